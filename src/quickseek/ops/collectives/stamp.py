"""A kernel that writes the device's clock: how the benchmark times single calls inside a graph."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from quickseek.ops import ptx

ARGUMENTS = "a"


class StampKernel:
    """One thread stores the global timer (nanoseconds, 64 bits) once everything before it is complete."""

    @cute.jit
    def __call__(self, target: Int64, stream: Any) -> None:
        self.kernel(target).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, target: Int64) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        ptx.store_long(target, cute.arch.globaltimer())
