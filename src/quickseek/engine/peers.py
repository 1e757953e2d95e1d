"""Whether the peers of a step came: time-outs of fused collectives, raised when results are read (decode.md L.6).

A collective that gives up lets its step finish with void results and raises a flag that stays up. The flag travels
to the host behind the results of each step, so that all ranks find the same step to be the first void one, however
late each of them reads, and have launched the same steps when they raise.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from quickseek.errors import CollectiveTimeout
from quickseek.model.causal_lm import CausalLM
from quickseek.parallel.watchdog import Watchdog


class Peers:
    """What the engine knows of a model's peers; ``watchdog`` None: no collective of it can miss one."""

    def __init__(self, watchdog: Watchdog | None) -> None:
        self.watchdog = watchdog
        self.flag = None if watchdog is None else watchdog.flag

    @classmethod
    def of(cls, model: CausalLM) -> "Peers":
        """The peers of the model's executor, if it has one that reaches them by a fabric."""
        executor = model.backbone.executor
        fabric = None if executor is None else executor.fabric
        return cls(None if fabric is None or fabric.size == 1 else Watchdog.of(fabric))

    def error(self) -> CollectiveTimeout | None:
        """The time-out that is recorded so far; what was launched last may have met it, or what came before."""
        return None if self.watchdog is None else self.watchdog.error()

    def check(self) -> None:
        """Raise the recorded ``CollectiveTimeout``, if any: before a first step, since all are void until ``reset``."""
        error = self.error()
        if error is not None:
            raise error

    def check_results(self, flag: Tensor | None) -> None:
        """Raise ``CollectiveTimeout`` if ``flag``, as it came back behind the results of a step, was up."""
        if self.watchdog is None or flag is None or not int(flag):
            return
        # A rank may have waited for nobody between its peer's giving up and the end of the step.
        nobody = CollectiveTimeout("collective", self.watchdog.fabric.rank, -1, -1, ())
        raise self.watchdog.error() or nobody

    def check_launched(self) -> None:
        """Wait for all that was launched on the current CUDA stream; raise the ``CollectiveTimeout`` it met, if any."""
        self.check_results(self.flag)
        self.check()

    def deferred(self) -> AbstractContextManager[None]:
        """Inside, collectives that are launched raise nothing: the ranks' results are checked when they are read."""
        return nullcontext() if self.watchdog is None else self.watchdog.deferred()

    def reset(self) -> None:
        """Empty the mailboxes after a ``CollectiveTimeout``. Collective."""
        if self.watchdog is not None:
            self.watchdog.reset()
