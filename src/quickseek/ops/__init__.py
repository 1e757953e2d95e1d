"""Arithmetic, one folder per operation: the door, its reference, its kernels (design: floor 3).

Other floors import doors only. A door validates, then picks an implementation for the device; ``reference.py``
of the same folder is plain PyTorch and defines what is right.
"""
