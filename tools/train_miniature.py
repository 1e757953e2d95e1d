"""Train the shipped miniature: the backbone, then the DSpark head on the frozen backbone's states.

First ``python tools/train_miniature.py --prepare`` where the two text packages are installed (tools/miniature/corpus.py
names them, their versions and licences); then, on one GPU, ``python tools/train_miniature.py --out DIR --minutes 8``.
The result is ``miniature.tar`` (a checkpoint directory in the released formats), the log as JSON lines, and the fp32
weights. ``--state FILE`` keeps what a later call needs to go on, ten times a phase; ``--steps`` and ``--draft-steps``
replace the clock.

``--backbone DIR`` goes on with the drafter of a checkpoint and leaves its backbone as it is, to the bit; ``--own-text``
gives it answers of that model (tools/write_text.py) beside the text.
"""

import argparse
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

START = time.monotonic()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from miniature import corpus, data, measure, objectives  # noqa: E402
from miniature.backbone import turns  # noqa: E402
from miniature.bank import Answers, Bank, Material, taught  # noqa: E402
from miniature.layers import Hashing  # noqa: E402
from miniature.objectives import Outcome, Setting  # noqa: E402
from miniature.rounding import Rounding  # noqa: E402
from miniature.sizes import CONTEXT, VOCAB_SIZE, config_for  # noqa: E402
from miniature.training import Limit, Log, Phase, Schedule, is_buffer, optimizer, parts  # noqa: E402
from miniature.weights import checkpoint_tensors, from_stored, initial, values  # noqa: E402
from quickseek.checkpoint.reader import Checkpoint  # noqa: E402
from quickseek.checkpoint.writer import write_checkpoint  # noqa: E402
from quickseek.config import ModelConfig  # noqa: E402
from quickseek.tokenizer.compressed_ids import compressed_id_table  # noqa: E402
from quickseek.tokenizer.tokenizer import Tokenizer  # noqa: E402

BACKBONE_UNTIL, DRAFT_UNTIL = 0.70, 0.96
"""Shares of the time, counted from the start of the process, at which the phases end; the rest writes the results."""
MEASURED = 32
"""Most held-out windows that the drafter is measured on."""
MOST_BYTES = 15 << 20
"""Of one file of fp32 weights."""
FILES = ("tokenizer.json", "tokenizer_config.json")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".train"), help="where --prepare put the tokens")
    parser.add_argument("--out", type=Path, help="an existing or new directory for the results")
    parser.add_argument("--prepare", action="store_true", help="read the text packages and write --data")
    parser.add_argument("--smoke", action="store_true", help="check kernels and times on this GPU, then stop")
    parser.add_argument("--minutes", type=float, help="wall time of the whole command")
    parser.add_argument("--steps", type=int, help="backbone steps, instead of --minutes")
    parser.add_argument("--draft-steps", type=int, default=0, help="drafter steps, with --steps")
    parser.add_argument("--state", type=Path, help="file to resume from and to keep")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a backbone step")
    parser.add_argument("--backbone", type=Path, help="checkpoint to start from: its drafter is trained, nothing else")
    parser.add_argument("--draft-batch", type=int, default=32, help="sequences of a drafter step")
    parser.add_argument("--sequences", type=int, default=8192, help="of the text, whose states the drafter learns from")
    parser.add_argument("--own-text", type=Path, nargs="+", help="parts that write_text.py wrote, for the drafter")
    parser.add_argument("--own-share", type=float, default=0.5, help="of a drafter step's sequences, from --own-text")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a sequence")
    parser.add_argument("--anchors", type=int, default=96, help="anchors of a sequence in a drafter step")
    parser.add_argument(
        "--later", type=float, default=objectives.LATER_DRAFT, help="weight of a draft over the one before"
    )
    parser.add_argument(
        "--greedy", type=float, default=0.0, help="share of the drafter's target on the likeliest token"
    )
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate; 1e-3 goes on from --backbone")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay of matrices")
    parser.add_argument("--dropout", type=float, default=0.1, help="of every sublayer's output")
    parser.add_argument("--warmup", type=int, default=200, help="steps until the rate is at its peak")
    parser.add_argument("--windows", type=int, default=96, help="held-out windows that are measured while training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="no CUDA graph")
    return parser.parse_args()


class Run:
    """One training run: its setting, weights and phases. It starts from ``kept`` weights if there are any."""

    def __init__(self, options: argparse.Namespace, kept: dict[str, Tensor] | None = None) -> None:
        self.options, self.device = options, torch.device(options.device)
        self.graph = self.device.type == "cuda" and not options.eager
        self.config: ModelConfig = config_for(options.data)
        sizes = json.loads((options.data / "sizes.json").read_text(encoding="utf-8"))
        self.text = data.Text.load(options.data, sizes["heldout_bytes"], self.device)
        tokenizer = Tokenizer.from_directory(options.data, vocab_size=VOCAB_SIZE)
        token_map = compressed_id_table(tokenizer, VOCAB_SIZE).to(self.device)
        self.setting = Setting(
            config=self.config,
            hashing=Hashing.of(self.config, token_map),
            rotation=turns(self.config, options.context + 8, torch.float32, self.device),
            dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32,
            dropout=options.dropout,
            taught=max(1, options.batch // 4),
            later=options.later,
            greedy=options.greedy,
        )
        self.source = Checkpoint.open(options.backbone) if options.backbone else None
        starting = self._starting_weights() if kept is None else kept
        self.weights = {name: w.to(self.device) for name, w in starting.items()}

    def _starting_weights(self) -> dict[str, Tensor]:
        if self.source is None:
            return initial(self.config, self.options.seed)
        for name in FILES:
            if (self.options.backbone / name).read_bytes() != (self.options.data / name).read_bytes():
                raise ValueError(f"{name} of {self.options.data} is not that of {self.options.backbone}")
        return from_stored(self.config, self.source)

    def backbone_phase(self) -> Phase:
        """Next-token training of everything but the drafter."""
        self._train("mtp.", False)
        options = self.options

        def objective(rounding: Rounding) -> Callable[..., Outcome]:
            return lambda ids: objectives.next_token(self.setting, self.weights, ids, rounding)

        def inputs(step: int) -> tuple[Tensor, ...]:
            return (data.draw(self.text, options.batch, options.context + 1, options.seed, step),)

        def held_out() -> dict[str, float]:
            return measure.held_out(self.setting, self.weights, self.text, options.context, options.windows)

        schedule = Schedule(options.rate, warmup_steps=options.warmup, round_from=0.5)
        chosen = optimizer(self.weights, options.decay)
        return Phase(
            "backbone", self.weights, chosen, schedule, objective, inputs, held_out, options.seed, graph=self.graph
        )

    def draft_phase(self) -> Phase:
        """Training of the drafter on the states of the backbone, which is frozen and rounded."""
        self._train("mtp.", True)
        options = self.options
        with torch.no_grad():
            on = Rounding(on=True)
            frozen = values(self.config, self.weights, self.setting.dtype, on, draft=False)

        block = self.config.dspark_block_size
        material, kept = self._material(frozen)

        def objective(rounding: Rounding) -> Callable[..., Outcome]:
            def of(ids: Tensor, aux: Tensor, hidden: Tensor, anchors: Tensor) -> Outcome:
                return objectives.acceptance(self.setting, frozen, self.weights, ids, aux, hidden, anchors, rounding)

            return of

        def inputs(step: int) -> tuple[Tensor, ...]:
            return material.draw(options.draft_batch, options.own_share, options.anchors, block, options.seed + 2, step)

        def held_out() -> dict[str, float]:
            figures: dict[str, float] = {}
            for name, rows in kept.items():
                figures |= measure.draft_lengths(self.setting, frozen, self.weights, rows, options.anchors, name)
            return figures

        # Weights of a checkpoint are rounded already: without rounding they would leave its grid and have to return.
        schedule = Schedule(options.rate, warmup_steps=options.warmup, round_from=0.0 if options.backbone else 0.4)
        chosen = optimizer(self.weights, options.decay)
        return Phase(
            "draft", self.weights, chosen, schedule, objective, inputs, held_out, options.seed + 3, graph=self.graph
        )

    def _material(self, frozen: dict[str, Tensor]) -> tuple[Material, dict[str, Bank]]:
        """Rows to learn from, and those to measure on by the name of their figures."""
        options = self.options
        # Other windows than the backbone's: its steps count from 0 too.
        ids = data.draw(self.text, options.sequences, options.context, options.seed + 1, 0)
        windows = data.held_out_windows(self.text.held_out, options.context, min(options.windows, MEASURED))
        kept = {"held_out": taught(self.setting, frozen, windows)}
        if not options.own_text:
            return Material(taught(self.setting, frozen, ids), None), kept
        answers, others = Answers.load(options.own_text, self.device).split()
        own, kept["held_out_own"] = (
            taught(self.setting, frozen, some.ids, first=some.prompt) for some in (answers, others)
        )
        text = taught(self.setting, frozen, ids).cut(answers.ids.shape[1], self.config.sliding_window)
        return Material(text, own), kept

    def _train(self, prefix: str, wanted: bool) -> None:
        for name, weight in self.weights.items():
            weight.requires_grad_(name.startswith(prefix) is wanted and not is_buffer(name))

    def limits(self) -> tuple[Limit, Limit]:
        """Of the two phases."""
        options = self.options
        if options.minutes is None:
            return Limit(options.steps), Limit(options.draft_steps)
        ends = [START + share * options.minutes * 60 for share in (BACKBONE_UNTIL, DRAFT_UNTIL)]
        return Limit(None, time.monotonic(), ends[0]), Limit(None, ends[0], ends[1])

    def write(self) -> None:
        """The checkpoint as one archive, and the fp32 weights in parts."""
        out = self.options.out
        files = {name: (self.options.data / name).read_text(encoding="utf-8") for name in FILES}
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "miniature")
            write_checkpoint(target, self.config, self._stored(), files=files)
            with tarfile.open(out / "miniature.tar", "w") as archive:
                archive.add(target, "miniature")
        for number, part in enumerate(parts(self.weights, MOST_BYTES)):
            torch.save(part, out / f"weights-{number}.pt")

    def _stored(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the checkpoint; those of a given backbone as they are, since values can have two encodings."""
        for name, tensor in checkpoint_tensors(self.config, self.weights):
            if self.source is None or name.startswith("mtp."):
                yield name, tensor
            else:
                yield name, self.source.read(name)


def train(options: argparse.Namespace) -> None:
    """Both phases, or the drafter's alone, with a checkpoint after each."""
    options.out.mkdir(parents=True, exist_ok=True)
    kept = torch.load(options.state, map_location=options.device) if options.state and options.state.exists() else None
    # The drafter's phase takes states of the backbone as soon as it is made.
    run = Run(options, None if kept is None else kept["weights"])
    log = Log(options.out / "log.jsonl", START)
    log.write("start", 0, 0.0, device=str(run.device), torch=torch.__version__)
    backbone_limit, draft_limit = run.limits()
    if options.backbone is None and (kept is None or kept["name"] == "backbone"):
        phase = run.backbone_phase()
        if kept is not None:
            phase.restore(kept)
            kept = None
        phase.run(backbone_limit, log, state=options.state)
        run.write()
        log.write("written", phase.step, 1.0)
    if options.minutes is None and not options.draft_steps:
        return
    phase = run.draft_phase()
    if draft_limit.steps is None:
        draft_limit = replace(draft_limit, since=time.monotonic())
    if kept is not None:
        phase.restore(kept)
    elif options.backbone is not None:
        log.write("draft", phase.step, 0.0, **phase.measure())
    phase.run(draft_limit, log, state=options.state)
    run.write()
    log.write("written", phase.step, 1.0)


def main() -> None:
    """Do what the command line asks."""
    options = arguments()
    if options.prepare:
        print(corpus.prepare(options.data, VOCAB_SIZE))
        return
    # Filling fresh memory is for finding reads of it, and costs a launch for each tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    if options.smoke:
        measure.smoke(lambda **changes: Run(argparse.Namespace(**{**vars(options), **changes})))
        return
    steps = options.steps if options.backbone is None else options.draft_steps or None
    if options.out is None or (options.minutes is None) == (steps is None):
        raise SystemExit("--out and either --minutes or --steps (with --backbone, --draft-steps) are needed")
    train(options)


if __name__ == "__main__":
    main()
