"""Where weights lie: graphs and copies read them there, so a live update changes them in place or is refused."""

from collections.abc import Iterator

from torch import Tensor, nn

from quickseek.model.engram import Engram


class Places:
    """Addresses of the parameters and n-gram tables of ``modules``, by name, as they are when this is built."""

    def __init__(self, **modules: nn.Module) -> None:
        self.modules = modules
        self.found = dict(self._look())

    def check(self) -> None:
        """RuntimeError naming the weights that have moved since."""
        now = dict(self._look())
        moved = [name for name, place in self.found.items() if now.get(name) != place]
        if moved:
            told = ", ".join(moved[:4]) + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")
            raise RuntimeError(f"weights must be changed in place, as graphs read them where they were: {told} moved")

    def _look(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for prefix, root in self.modules.items():
            for name, parameter in root.named_parameters():
                yield f"{prefix}.{name}", (parameter.data_ptr(),)
            for name, module in root.named_modules():
                if isinstance(module, Engram) and module.table is not None:
                    table = module.table
                    tensors = (table,) if isinstance(table, Tensor) else (table.codes, table.scales)
                    yield f"{prefix}.{name}.table", tuple(tensor.data_ptr() for tensor in tensors)
