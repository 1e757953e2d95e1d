"""The ``quickseek`` command."""

import io
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from quickseek.errors import QuickseekError, RankFailure
from quickseek.parallel.faults import PeersLost

if TYPE_CHECKING:
    from quickseek.engine.answer import RequestOutput
    from quickseek.llm import LLM
    from quickseek.parallel.world import World
    from quickseek.sampling_params import SamplingParams

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="DeepSeek-V4.1-Flash, fast."
)


@app.callback()
def _options() -> None:
    """DeepSeek-V4.1-Flash for people who wait on each token."""


@app.command()
def tiny(
    directory: Annotated[Path, typer.Argument(help="Directory to write; it must not exist yet or be empty.")],
    config: Annotated[str, typer.Option(help="tiny, tiny-tp or mid.")] = "tiny",
    overwrite: Annotated[bool, typer.Option(help="Replace a checkpoint that is already there.")] = False,
) -> None:
    """Write a miniature checkpoint in the released formats, with random weights: its text means nothing."""
    from quickseek.checkpoint.miniature import write_miniature

    written = write_miniature(directory, config, overwrite=overwrite)
    size = sum(path.stat().st_size for path in directory.iterdir())
    typer.echo(f"{directory}: {config}, {written.num_hidden_layers} layers, {size / 1e6:.1f} MB", err=True)


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Checkpoint directory, hub repository, or miniature (in the package).")],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option(help="A user's message to answer.")] = None,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model reason first, with --chat.")] = False,
    effort: Annotated[
        str | None, typer.Option(help="Reasoning effort, with --thinking: 1..100, low, high, xhigh or max.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on after the end token.")] = False,
    speculative_tokens: Annotated[int, typer.Option(help="Drafts per step, up to the trained block.")] = 0,
    mode: Annotated[str, typer.Option(help="auto, exact or trained (spec/equality.md).")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32 or float64, in exact mode.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    max_model_len: Annotated[int | None, typer.Option(help="Longest context, prompt and answer together.")] = None,
    decode_backend: Annotated[str, typer.Option(help="auto, stock or latency_specialized.")] = "auto",
    decode_paths_off: Annotated[
        str, typer.Option(help="Paths of the specialized decode to leave out, separated by commas.")
    ] = "",
    tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Ranks, one GPU each, started here unless torchrun did; default 1 or torchrun's.")
    ] = None,
    jit_warmup: Annotated[
        bool,
        typer.Option(
            help="Compile all kernels before the answer; otherwise each is compiled when the answer first needs it."
        ),
    ] = False,
) -> None:
    """Generate text, written to the terminal as it comes, and a closing line of figures."""
    if (prompt is None) == (chat is None):
        raise typer.BadParameter("give either --prompt or --chat")
    if chat is None and (system is not None or thinking or effort is not None):
        raise typer.BadParameter("--system, --thinking and --effort go with --chat")
    if effort is not None and not thinking:
        raise typer.BadParameter("--effort goes with --thinking: without it the prompt does not ask for reasoning")
    from quickseek.parallel.launch import PATIENCE_S, launched_ranks, spawn, world_from_environment
    from quickseek.sampling_params import SamplingParams

    launched = launched_ranks()
    ranks = (launched or 1) if tensor_parallel_size is None else tensor_parallel_size
    if launched is not None and launched != ranks:
        raise typer.BadParameter(f"--tensor-parallel-size {ranks}: torchrun started {launched} ranks")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, ignore_eos=ignore_eos
    )
    options: dict[str, Any] = {
        "mode": mode,
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "num_speculative_tokens": speculative_tokens,
        "decode_backend": decode_backend,
        "decode_paths_off": decode_paths_off,
        "tensor_parallel_size": ranks,
        "jit_warmup": jit_warmup,
    }
    question = _Question(prompt, chat, system, thinking, _effort(effort))
    if ranks == 1:
        _answer(None, model, options, question, params)
        return
    from quickseek.config import EngineConfig

    EngineConfig(**options)  # what is wrong with an option is said once, not by each rank
    kind, _, number = device.partition(":")
    if number:
        raise typer.BadParameter(f"--device {device} with {ranks} ranks: give {kind}, each rank takes a GPU of its own")
    if launched is not None:
        _answer(world_from_environment(device, timeout_s=PATIENCE_S), model, options, question, params)
        return
    try:
        spawn(_answer_spawned, ranks, model, options, question, params, timeout_s=None, device=device)
    except RankFailure as failure:
        raise failure.__cause__ or failure from None


@dataclass(frozen=True)
class _Question:
    """What ``generate`` is asked: text to continue, or a message with what goes with it."""

    prompt: str | None
    chat: str | None
    system: str | None
    thinking: bool
    effort: int | str | None

    def ids(self, llm: "LLM") -> list[int]:
        if self.chat is None:
            assert self.prompt is not None
            return llm.encode_text(self.prompt)
        messages = [{"role": "user", "content": self.chat}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return llm.encode_chat(messages, thinking=self.thinking, reasoning_effort=self.effort)


def _answer_spawned(world: "World", *question: Any) -> None:
    _prepare_terminal()
    _answer(world, *question)


def _answer(
    world: "World | None", model: str, options: dict[str, Any], question: _Question, params: "SamplingParams"
) -> None:
    """Answer on this rank; rank 0 writes. Raises QuickseekError for an answer that was cut short."""
    from quickseek.llm import LLM

    speaks = world is None or world.rank == 0
    if not speaks:
        logging.disable(logging.WARNING)  # rank 0 warns of the same
    llm = LLM(model, world=world, **options)
    output = None
    for text, output in llm.stream(question.ids(llm), params):  # noqa: B007  the last output is reported below
        if speaks:
            sys.stdout.write(text)
            sys.stdout.flush()
    assert output is not None
    if speaks:
        sys.stdout.write("\n")
        sys.stdout.flush()
        typer.echo(figures(llm, output), err=True)
    # A rank that leaves early ends what its peers still read from it.
    llm.world.barrier()
    if output.error is not None:
        raise QuickseekError(f"the answer was cut short: {output.error}")


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Option(help='Checkpoint directory or "miniature", for its needs and memory plan.')
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks, one GPU each.")] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    mode: Annotated[str, typer.Option(help="auto, exact or trained (spec/equality.md).")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest context, prompt and answer together.")] = None,
) -> None:
    """Print what this machine has, and what the specialized decode needs and does not find."""
    from quickseek.checkpoint.hub import resolve
    from quickseek.config import EngineConfig, ModelConfig
    from quickseek.decode.gates import FUSED_MHC_MAX_ROWS
    from quickseek.decode.probes import probes, too_few_gpus
    from quickseek.decode.requirements import unsupported
    from quickseek.llm import memory_plan

    options = EngineConfig(
        tensor_parallel_size=tensor_parallel_size, device=device, mode=mode, max_model_len=max_model_len
    )
    for probe in probes():
        typer.echo(str(probe))
    config = None
    if model is not None:
        directory = resolve(model)
        config = ModelConfig.from_file(directory)
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        typer.echo(f"{'weights:':<24}{weights / (1 << 30):.2f} GiB on disk")
        typer.echo(str(memory_plan(options, config)))
    missing = unsupported(options, config)
    if device.startswith("cuda") and tensor_parallel_size > 1:
        missing += too_few_gpus(tensor_parallel_size)
    what = f"specialized decode on {device}, TP {tensor_parallel_size}"
    if missing:
        typer.echo("\n".join([f"{what}: not available, it needs", *(f"  - {line}" for line in missing)]))
    else:
        typer.echo(f"{what}: available, for decode steps of 1 to {FUSED_MHC_MAX_ROWS} rows")


def _effort(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def figures(llm: "LLM", output: "RequestOutput") -> str:
    """One line: how many tokens, how fast, under which conditions."""
    import torch

    count = len(output.token_ids)
    line = f"{len(output.prompt_token_ids)} prompt tokens, {count} generated, first after {output.first_token_s:.2f} s"
    if count > 1:
        line += f", then {(count - 1) / max(output.total_s - output.first_token_s, 1e-9):.1f} tokens/s"
    if output.drafted:
        # Rounded up: a step whose drafts were cut short is one too.
        steps = -(-output.drafted // llm.engine_config.num_speculative_tokens)
        positions = "/".join(f"{count / steps:.0%}" for count in output.accepted_at)
        line += f", {output.accepted} of {output.drafted} drafts accepted ({positions} by position)"
    cycle = llm.runner.cycle
    if cycle.steps:
        line += f", {cycle.specialized / cycle.steps:.0%} of {cycle.steps} steps specialized"
    numerics = llm.model.numerics
    mode = llm.engine_config.resolved_mode
    device = llm.world.device
    where = f"cpu, {torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
    if llm.world.size > 1:
        where = f"TP {llm.world.size}, {where} each"
    return f"{line} ({mode} {str(numerics.dtype).removeprefix('torch.')}, {where})"


def _prepare_terminal() -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows another


def main() -> None:
    """Run the command; an error that a user can act on is one line on stderr and exit code 2.

    Exit code 1, and a line too, for a rank that cannot go on without its peers.
    """
    _prepare_terminal()
    try:
        app()
    except (QuickseekError, OSError) as error:
        _end(2, str(error), error)
    except NotImplementedError as error:
        _end(2, f"not implemented: {error}", error)
    except PeersLost as lost:
        _end(1, " ".join(str(lost).split()), lost)
    except SystemExit as ended:
        # Typer has told of it: a wrong option, or Ctrl-C.
        if isinstance(ended.code, int) and ended.code:
            _tell_peers(ended.code, ended)
        raise


def _end(code: int, words: str, error: BaseException) -> NoReturn:
    typer.echo(f"error: {words}", err=True)
    _tell_peers(code, error)
    sys.exit(code)


def _tell_peers(code: int, error: BaseException) -> None:
    """Where there are any: else the module that makes worlds, and PyTorch with it, has not been loaded."""
    launch = sys.modules.get("quickseek.parallel.launch")
    if launch is not None:
        launch.ending(code, error)


if __name__ == "__main__":
    main()
