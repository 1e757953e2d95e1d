"""``AllReduceMHC`` on CUDA: mailboxes, the choice of protocol by rows, and the launches (spec/decode.md B.7, B.8)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quickseek.ops.collectives.boundary import BoundaryKernel, Operands, fitting_threads
from quickseek.ops.collectives.publish import OwnerKernel, PublishKernel
from quickseek.ops.collectives.push import GENERATIONS, Contribution, Exchange, form_of
from quickseek.ops.collectives.spec import (
    AllReduceShape,
    Boundary,
    PublishTarget,
    Result,
    Routed,
    agree,
    require,
)
from quickseek.ops.collectives.thresholds import Thresholds, thresholds
from quickseek.ops.compiled import compiled, current_stream, typed
from quickseek.parallel.fabric import Fabric, Mailbox
from quickseek.parallel.watchdog import Watchdog
from quickseek.parallel.world import together

SENTINEL_HALF = -0x8000
STATE_WORDS = 4
SPARE_THREADS = 128
"""Threads' worth of every multiprocessor that waiting blocks leave free, for a gather on another CUDA stream."""

BOUNDARY_ARGUMENTS = (Contribution, Operands, Exchange, "i", "i")
PUBLISH_ARGUMENTS = (Contribution, Exchange, "i")
OWNER_ARGUMENTS = (Exchange, "i")


class FusedAllReduceMHC:
    """The ``Implementation`` for one rank of ``fabric``; arguments come validated.

    Three forms, bits equal: *fused* (one kernel) up to ``fused_rows`` rows, *one-shot* (publish, collect) above, and
    *two-shot* (publish, owner sums, collect) from ``bt_min_rows`` rows. ``publish`` and ``collect`` can be called by
    themselves, with all ranks' publishes first, by one process that plays several ranks. Ranks in turns take no fused
    form, and meet before each kernel that waits for what the others send.
    """

    def __init__(self, shape: AllReduceShape, fabric: Fabric, chosen: Thresholds | None = None) -> None:
        self.shape, self.fabric, self.device = shape, fabric, fabric.device
        self.ranks = fabric.size
        agree(fabric, (replace(shape, device=torch.device("cuda")), chosen))
        capability = torch.cuda.get_device_capability(self.device)[0]
        self.thresholds = chosen or thresholds(capability, self.ranks)
        self.threads, self.cluster = self.thresholds.geometry(shape.hidden_size)
        absent = shape.max_num_tokens + 1
        self.bt_min_rows = min(absent, shape.two_shot_rows or self.thresholds.two_shot_rows or absent)
        self.bt_min_finalize_rows = min(absent, shape.two_shot_rows or self.thresholds.two_shot_finalize_rows or absent)
        if self.ranks == 1 or fabric.one_shot_only:
            self.bt_min_rows = self.bt_min_finalize_rows = absent
        self.single_rows = self._resident_clusters()
        fused = self.thresholds.fused_rows if fabric.turns is None else 0
        self.fused_rows = shape.max_num_tokens if self.ranks == 1 else fused
        self._pending: tuple[int, bool] | None = None
        self._summed = False
        self._allocate()
        together(fabric, "compiling AllReduceMHC", self.compile)
        self.refill()
        # No peer may publish before this rank's sentinels are in place.
        fabric.barrier()

    # ------------------------------------------------------------------------------------------ construction

    def _resident_clusters(self) -> int:
        """Clusters that may wait for peers at once: all of them run, and room is left for what runs beside them."""
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        trips = -(-self.shape.hidden_size // 8 // (self.threads * self.cluster))
        blocks = processors * (fitting_threads(self.ranks, trips) - SPARE_THREADS) // self.threads
        # Kernels let their dependents start at once: while a call waits, blocks of the same rank's next one hold slots.
        waiting = self.fabric.ranks_on_device
        return max(1, blocks // self.cluster // (2 * waiting if waiting > 1 and self.fabric.turns is None else waiting))

    def _allocate(self) -> None:
        capacity, hidden = self.shape.max_num_tokens, self.shape.hidden_size
        self.two_shot_built = min(self.bt_min_rows, self.bt_min_finalize_rows) <= capacity
        self.one_shot_capacity = min(capacity, max(self.bt_min_rows, self.bt_min_finalize_rows) - 1)
        self.watchdog = Watchdog.of(self.fabric)
        self.instance = self.watchdog.register(self)
        self.one_shot_state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device)
        self.two_shot_state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=self.device)
        self.mailboxes: list[Mailbox] = []
        # What the kernels are told of their peers; one rank alone has none to be told of.
        self.exchange: dict[str, Exchange] = {"fused": typed(Exchange, *[0] * 8)}
        if self.ranks > 1:
            self.one_shot = self._mailbox(self.ranks, max(1, self.one_shot_capacity), hidden)
            one_shot = self._exchange(self.one_shot, self.one_shot, self.one_shot_state)
            self.exchange = dict.fromkeys(("publish", "fused", "collect"), one_shot)
            if self.two_shot_built:
                self.contributions = self._mailbox(self.ranks, -(-capacity // self.ranks), hidden)
                self.reduced = self._mailbox(1, capacity, hidden)
                state = self.two_shot_state
                self.exchange["contribute"] = self._exchange(self.contributions, self.contributions, state)
                self.exchange["own"] = self._exchange(self.contributions, self.reduced, state)
                self.exchange["reduced"] = self._exchange(self.reduced, self.reduced, state)

    def _exchange(self, read: Mailbox, written: Mailbox, state: Tensor) -> Exchange:
        return typed(
            Exchange, read.local.data_ptr(), written.peer_pointers.data_ptr(), written.multicast_pointer,
            state.data_ptr(), self.watchdog.control, int(self.shape.timeout_s * 1e9), self.instance, self.fabric.rank,
        )  # fmt: skip

    def _mailbox(self, sources: int, capacity: int, hidden: int) -> Mailbox:
        mailbox = self.fabric.allocate([GENERATIONS, sources, capacity, hidden], torch.bfloat16)

        def check() -> None:
            if mailbox.local.data_ptr() % 16 or mailbox.multicast_pointer % 16:
                raise RuntimeError(f"peer memory at {mailbox.local.data_ptr():#x}: 16-byte alignment")

        together(self.fabric, "placing a mailbox", check)
        self.mailboxes.append(mailbox)
        return mailbox

    def refill(self) -> None:
        """Fill the own mailboxes with the sentinel and zero the own states (``Watchdog.reset``)."""
        for mailbox in self.mailboxes:
            mailbox.local.view(torch.int16).fill_(SENTINEL_HALF)
        self.one_shot_state.zero_()
        self.two_shot_state.zero_()
        self._pending = None

    def reset(self) -> None:
        """Empty all mailboxes of the fabric. Collective."""
        self.watchdog.reset()

    def compile(self) -> None:
        """Build and load every kernel that a call can need, so that none is built under capture."""
        tops = {0, self.shape.top_k}
        for top_k in tops:
            for kind in self._kinds():
                for looped in self._loops():
                    self._boundary_kernel("fused", kind, top_k, looped)
            if self.ranks > 1:
                self._publish_kernel(top_k, two_shot=False)
                if self.two_shot_built:
                    self._publish_kernel(top_k, two_shot=True)
        if self.ranks > 1:
            for kind in self._kinds():
                self._boundary_kernel("collect", kind, 0)
                if self.two_shot_built:
                    self._boundary_kernel("reduced", kind, 0)
            if self.two_shot_built:
                self._owner_kernel()

    def _loops(self) -> list[bool]:
        most = min(self.fused_rows, self.shape.max_num_tokens)
        return [False, True] if self.ranks > 1 and most > self.single_rows else [False]

    def _kinds(self) -> list[str]:
        kinds = ["plain"]
        if self.shape.quantize_layer_input:
            kinds.append("quantize")
        if self.shape.residual_only:
            kinds.append("residual")
        return kinds

    def _boundary_kernel(self, source: str, kind: str, top_k: int, looped: bool = False) -> Any:
        fused_form = form_of(self.one_shot if source == "fused" and self.ranks > 1 else None)
        return compiled(
            BoundaryKernel, BOUNDARY_ARGUMENTS, self.device,
            hidden=self.shape.hidden_size, streams=self.shape.hc_mult, ranks=self.ranks,
            capacity=self.shape.max_num_tokens if source == "reduced" else max(1, self.one_shot_capacity),
            threads=self.threads, cluster=self.cluster, source=source,
            normalise=kind != "residual", quantize=kind == "quantize", top_k=top_k, looped=looped, **fused_form,
        )  # fmt: skip

    def _publish_kernel(self, top_k: int, *, two_shot: bool) -> Any:
        return compiled(
            PublishKernel, PUBLISH_ARGUMENTS, self.device,
            hidden=self.shape.hidden_size, ranks=self.ranks, top_k=top_k, two_shot=two_shot,
            capacity=self.shape.max_num_tokens if two_shot else max(1, self.one_shot_capacity),
            **form_of(None if two_shot else self.one_shot),
        )  # fmt: skip

    def _owner_kernel(self) -> Any:
        return compiled(
            OwnerKernel, OWNER_ARGUMENTS, self.device,
            hidden=self.shape.hidden_size, ranks=self.ranks, capacity=self.shape.max_num_tokens,
            **form_of(self.reduced),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------ calls

    def all_reduce(self, x: Tensor, boundary: Boundary) -> Result:
        return self._call(x, None, boundary)

    def finalize(self, routed: Routed, boundary: Boundary) -> Result:
        return self._call(routed.shared_output, routed, boundary)

    def _call(self, x: Tensor, routed: Routed | None, boundary: Boundary) -> Result:
        rows = x.shape[0]
        if rows < self._two_shot_from(routed) and rows <= self.fused_rows:
            self._check_idle()
            return self._launch_boundary("fused", x, routed, boundary, rows)
        fits = self.fabric.ranks_on_device == 1 or self.fabric.turns is not None or rows <= self.single_rows
        require(fits, f"{rows} rows on ranks that share a GPU: at most {self.single_rows}, or publish and collect")
        self.publish(x, routed)
        self.sum_owned()
        return self.collect(boundary)

    def _two_shot_from(self, routed: Routed | None) -> int:
        return self.bt_min_rows if routed is None else self.bt_min_finalize_rows

    def _check_idle(self) -> None:
        self.watchdog.check()
        if self._pending is not None:
            raise RuntimeError("a published contribution is still unreduced")

    def publish(self, x: Tensor, routed: Routed | None = None) -> None:
        """Store this rank's contribution into the peers' mailboxes; ``sum_owned`` and ``collect`` must follow."""
        self._check_idle()
        rows = x.shape[0]
        two_shot = rows >= self._two_shot_from(routed)
        require(self.ranks > 1, "one rank has no mailbox to publish into: call the collective itself")
        kernel = self._publish_kernel(0 if routed is None else self.shape.top_k, two_shot=two_shot)
        exchange = self.exchange["contribute" if two_shot else "publish"]
        kernel(_contribution(x, routed), exchange, rows, current_stream(self.device))
        self._pending, self._summed = (rows, two_shot), not two_shot

    def published_rows(self) -> int:
        """The rows that wait to be collected."""
        return self._published()[0]

    def _published(self) -> tuple[int, bool]:
        if self._pending is None:
            raise RuntimeError("no published contribution")
        return self._pending

    def sum_owned(self) -> None:
        """Two-shot only: sum the tokens that this rank owns and send the sums to every rank."""
        rows, two_shot = self._published()
        if two_shot:
            if self._summed:
                raise RuntimeError("the owned tokens of this publish are summed already")
            self._summed = True
            self._meet()
            self._owner_kernel()(self.exchange["own"], rows, current_stream(self.device))

    def collect(self, boundary: Boundary) -> Result:
        """Wait for the ranks' contributions to the published rows and carry their sum over the boundary."""
        rows, two_shot = self._published()
        if not self._summed:
            raise RuntimeError("sum_owned comes before collect in the two-shot form")
        self._meet()
        result = self._launch_boundary("reduced" if two_shot else "collect", None, None, boundary, rows)
        self._pending = None
        return result

    def _meet(self) -> None:
        """Ranks in turns: return once all have launched what comes before."""
        if self.fabric.turns is not None:
            self.fabric.turns.barrier()

    def _launch_boundary(
        self, source: str, x: Tensor | None, routed: Routed | None, boundary: Boundary, rows: int
    ) -> Result:
        pre, norm, mxfp8 = boundary.pre, boundary.norm_weight, boundary.mxfp8_out
        kind = "residual" if pre is None else "plain" if mxfp8 is None else "quantize"
        looped = source == "fused" and self.ranks > 1 and rows > self.single_rows
        # As few rounds as the clusters allow, all of nearly the same number of rows.
        clusters = -(-rows // -(-rows // self.single_rows)) if looped else rows
        kernel = self._boundary_kernel(source, kind, 0 if routed is None else self.shape.top_k, looped)
        streams = torch.empty_like(boundary.residual)
        output = None if pre is None else streams.new_empty(rows, self.shape.hidden_size)
        values, scales = mxfp8 if mxfp8 is not None else (None, None)
        operands = typed(
            Operands, boundary.residual.data_ptr(), boundary.post.data_ptr(), boundary.comb.data_ptr(), _address(pre),
            _address(norm), boundary.norm_eps, streams.data_ptr(), _address(output), _address(values), _address(scales),
        )  # fmt: skip
        given = _contribution(x, routed)
        kernel(given, operands, self.exchange[source], rows, clusters, current_stream(self.device))
        return streams, output

    def publish_target(self, rows: int) -> PublishTarget:
        """Where a producer stores ``rows`` rows itself."""
        self._require_one_shot(rows)
        box = self.one_shot
        return PublishTarget(
            box.peer_pointers.data_ptr(), box.multicast_pointer, self.one_shot_state.data_ptr(),
            self.one_shot_capacity, self.fabric.rank, self.ranks,
        )  # fmt: skip

    def mark_published(self, rows: int) -> None:
        """A producer that publishes ``rows`` rows has been launched; ``collect`` must follow."""
        self._require_one_shot(rows)
        self._check_idle()
        self._pending, self._summed = (rows, False), True

    def _require_one_shot(self, rows: int) -> None:
        require(self.ranks > 1 and 1 <= rows < self.bt_min_rows, f"{rows} rows are not published one-shot")

    def drop_mark(self) -> None:
        """Forget a publish that was captured but never executed."""
        self._pending = None


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _contribution(x: Tensor | None, routed: Routed | None) -> Contribution:
    if routed is None:
        return typed(Contribution, _address(x), 0, 0, 0)
    return typed(
        Contribution, _address(x), routed.gemm2_permuted.data_ptr(), routed.expert_weights.data_ptr(),
        routed.expanded_idx_to_permuted_idx.data_ptr(),
    )  # fmt: skip
