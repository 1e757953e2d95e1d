"""The shipped miniature, as it is made: text, sizes, whole-sequence forward, training phases, measurements."""
