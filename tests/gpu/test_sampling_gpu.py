"""Choosing tokens on a GPU over the released vocabulary: against the reference, in graphs, and as distributions."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compare import assert_bits, assert_distribution, assert_float64
from op_cases import poisoned_outputs
from quickseek.ops import sampling
from quickseek.ops.sampling import reference

sys.path.insert(0, str(Path(__file__).parents[1] / "ops" / "sampling"))
import test_sampling_choice as choice
import test_sampling_verify as speculation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

VOCABULARY = 129280
CUDA = torch.device("cuda")


@pytest.fixture
def on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests written for any device make their tensors on the GPU."""
    for name in ("TARGET", "DRAFTER", "IDS"):
        monkeypatch.setattr(speculation, name, getattr(speculation, name).to(CUDA))
    torch.set_default_device(CUDA)
    yield
    torch.set_default_device("cpu")


def logits_of(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(rows)
    logits = torch.randn(rows, VOCABULARY, generator=generator, device=CUDA).to(dtype) * 3
    logits[0, 100:] = logits[0, 100:].round()  # many ties
    return logits


def settings(rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top_p, top_k and min_p of rows that take these in turn."""

    def column(*values: float) -> Tensor:
        return torch.tensor(values, device=CUDA).repeat(rows)[:rows]

    return column(0.7, 1.0, 0.0, 1.6), column(0.95, 1.0, 0.6), column(0, 50, -1, 4000, 3).long(), column(0, 0, 1e-3)


def replayed(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The outputs of the second replay of a graph that holds the call; what it writes is spoilt before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    graph.replay()
    for out in found:
        out.zero_()
    graph.replay()
    return found


@pytest.mark.parametrize("rows", [1, 6, 48])
def test_distributions_are_those_of_the_reference(rows: int) -> None:
    logits, parameters = logits_of(rows), settings(rows)
    with poisoned_outputs():
        found = sampling.probabilities(logits, *parameters[:2], top_k=parameters[2], min_p=parameters[3])
    expected = reference.probabilities(logits, *parameters)
    assert_float64(found, expected)
    assert torch.equal((found > 0).sum(1), (expected > 0).sum(1))
    alone = sampling.probabilities(
        logits[-1:], *(p[-1:] for p in parameters[:2]), top_k=parameters[2][-1:], min_p=parameters[3][-1:]
    )
    assert_bits(alone, found[-1:], "a row by itself")
    with pytest.raises(AssertionError):
        assert_float64(found, reference.probabilities(logits, parameters[0], 0.9 * parameters[1], *parameters[2:]))


@pytest.mark.parametrize("rows", [1, 6, 48])
def test_choices_are_those_of_the_reference(rows: int) -> None:
    logits, (temperature, _, _, _) = logits_of(rows), settings(rows)
    logits[-1, 77_777] = torch.nan if rows > 1 else 50.0
    tokens = torch.arange(rows, device=CUDA) * 2000
    with poisoned_outputs():
        best, likely = sampling.greedy(logits), sampling.draft_distribution(logits, temperature, tokens, tokens)
        logs = sampling.log_probabilities(logits, tokens, 20)
    assert_bits(best, reference.greedy(logits))
    rows_with_a_choice = sampling.valid(logits)
    kept = reference.most_likely(logits, temperature, sampling.DRAFT_WIDTH)
    assert_bits(likely[1].ids[rows_with_a_choice], kept.ids[rows_with_a_choice])
    assert_float64(likely[1].probabilities, kept.probabilities)
    expected = reference.log_probabilities(logits, tokens, 20)
    assert_bits(logs.ids[rows_with_a_choice], expected.ids[rows_with_a_choice])
    assert_bits(logs.rank, expected.rank)
    assert (logs.values - expected.values)[rows_with_a_choice].abs().max() < 1e-5
    assert (logs.chosen - expected.chosen)[rows_with_a_choice].abs().max() < 1e-5
    assert not torch.equal(best, reference.greedy(-logits))


def test_random_numbers_are_those_of_the_reference_bit_for_bit() -> None:
    seeds = torch.tensor([0, -1, 2**62 + 12345, 77, -(2**63)], device=CUDA).repeat(100)
    positions = torch.arange(500, device=CUDA) * 2**33 + 5
    assert_bits(sampling.uniform(seeds, positions, 2), reference.uniform(seeds, positions, 2))
    assert not torch.equal(sampling.uniform(seeds, positions, 2), reference.uniform(seeds, positions, 1))


def test_draws_from_the_whole_vocabulary_follow_it() -> None:
    logits = torch.full((1, VOCABULARY), -torch.inf, device=CUDA)
    ids = torch.tensor([0, 4095, 4096, 60_000, 100_000, VOCABULARY - 1], device=CUDA)
    logits[0, ids] = torch.tensor([0.1, 0.3, -1.0, 1.0, 0.0, 0.5], device=CUDA)
    chances = sampling.probabilities(logits, torch.ones(1, device=CUDA), torch.ones(1, device=CUDA))
    seeds = torch.arange(2000, device=CUDA)
    numbers = sampling.uniform(seeds, 7 * seeds, sampling.PURPOSE_TOKEN)
    draw = sampling.form(sampling.__name__, chances).draw
    drawn = draw(chances.expand(2000, -1), numbers)
    assert_bits(drawn, reference.draw(chances.expand(2000, -1), numbers))
    assert_distribution(torch.searchsorted(ids, drawn), chances[0, ids])
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distribution(torch.searchsorted(ids, drawn), chances[0, ids.flip(0)])


@pytest.mark.parametrize("rows", [1, 6, 48])
def test_replayed_graphs_give_the_same_bits(rows: int) -> None:
    logits, (temperature, top_p, top_k, min_p) = logits_of(rows), settings(rows)
    seeds = torch.arange(rows, device=CUDA)
    drafts = torch.zeros(rows, 0, dtype=torch.int64, device=CUDA)

    def everything() -> tuple[Tensor, ...]:
        best = sampling.greedy(logits)
        token = sampling.sample(logits, temperature, top_p, seeds, seeds, 0, top_k=top_k, min_p=min_p)
        draft, source = sampling.draft_distribution(logits, temperature, seeds, seeds)
        matched = sampling.match(best.unsqueeze(1), drafts, 0 * seeds)
        return best, token, draft, *source, *matched, *sampling.log_probabilities(logits, token, 20)

    eager = everything()
    for first, again, graph in zip(eager, everything(), replayed(everything), strict=True):
        assert_bits(again, first, "a second run")
        assert_bits(graph, first, "a replay")
    assert not torch.equal(eager[1], sampling.sample(logits, temperature, top_p, seeds + 1, seeds, 0))


def test_verification_and_penalties_run_in_a_graph_and_equal_the_cpu() -> None:
    batch, drafts, slots = 8, 5, 9
    rows = batch * (drafts + 1)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (batch, drafts), generator=generator)
    chances = torch.softmax(torch.randn(batch, drafts + 1, VOCABULARY, generator=generator) * 8, -1).double()
    ids = torch.randint(0, VOCABULARY, (batch, drafts, 64), generator=generator)
    ids[:, :, 0] = tokens
    source = sampling.SparseDistribution(ids, torch.softmax(torch.randn(ids.shape, generator=generator), -1).double())
    counts = torch.randint(0, drafts + 1, (batch,), generator=generator)
    penalties = sampling.Penalties(
        torch.randint(0, 3, (slots, VOCABULARY), generator=generator, dtype=torch.int32),
        torch.rand(slots, VOCABULARY, generator=generator) < 0.1,
        torch.randint(0, slots, (rows,), generator=generator),
        sampling.drafts_before(tokens),
        *(torch.rand(3, rows, generator=generator) + 0.5),
    )
    ends = sampling.Ends(torch.randint(0, VOCABULARY, (rows, 3), generator=generator), torch.rand(rows) < 0.5)
    bias = sampling.Bias(torch.arange(rows * 4).view(rows, 4) * 300, torch.randn(rows, 4, generator=generator))
    mask = torch.randint(-(2**31), 2**31, (rows, VOCABULARY // 32), generator=generator).to(torch.int32)

    def everything(device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
        def moved(values: tuple[Tensor, ...]) -> list[Tensor]:
            return [value.to(device) for value in values]

        verify = moved((chances, tokens)), sampling.SparseDistribution(*moved(source)), counts.to(device)
        seeds = torch.arange(batch, device=device)
        logits = chances.flatten(0, 1).log().float().to(device)
        kinds = {
            "penalties": sampling.Penalties(*moved(penalties)),
            "bias": sampling.Bias(*moved(bias)),
            "bitmask": mask.to(device),
            "ends": sampling.Ends(*moved(ends)),
        }

        def run() -> tuple[Tensor, ...]:
            verified = sampling.verify(*verify[0], verify[1], seeds, seeds, verify[2])
            return *verified, sampling.adjust(logits, **kinds)  # type: ignore[arg-type]

        return run

    here, there = everything(torch.device("cpu"))(), everything(CUDA)()
    assert_bits(there[0].cpu(), here[0])
    assert_bits(there[1].cpu(), here[1])
    assert (there[2].cpu() - here[2]).abs().nan_to_num(0.0).max() < 1e-5
    for first, graph in zip(there, replayed(everything(CUDA)), strict=True):
        assert_bits(graph, first, "a replay")
    assert not torch.equal(here[1], sampling.verify(chances, tokens, source, counts, counts, counts).tokens)


@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize("setting", speculation.SETTINGS, ids=str)
@pytest.mark.parametrize("form", speculation.FORMS)
def test_two_tokens_follow_the_target_whatever_the_drafts(form: str, setting: speculation.Setting) -> None:
    pairs = speculation.two_tokens(form, setting, sampling.verify)
    speculation.check(pairs, setting)
    with pytest.raises(AssertionError, match="chi-square"):
        speculation.check(pairs, speculation.Setting(temperature=3.0))


@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize(
    "test",
    [
        choice.test_rows_have_parameters_of_their_own,
        choice.test_ties_go_to_the_lowest_ids,
        choice.test_an_id_at_minus_infinity_is_never_chosen,
        choice.test_the_same_arguments_always_give_the_same_token,
        choice.test_log_probabilities_are_the_logarithms_of_softmax_with_ranks,
        speculation.test_sampled_drafts_of_the_target_itself_are_always_accepted,
        speculation.test_greedy_and_sampled_requests_share_a_batch,
        speculation.test_greedy_drafts_leave_the_tokens_of_a_seed_as_they_are,
        speculation.test_a_draft_of_a_broken_drafter_is_replaced_by_a_token_of_the_target,
        speculation.test_drafts_come_from_the_64_most_likely_ids_and_q_says_so,
    ],
    ids=lambda test: test.__name__,
)
def test_on_the_gpu(test: Callable[[], None]) -> None:
    test()


@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize("temperature", [0.0, 0.6, 2.0])
@pytest.mark.parametrize(("top_p", "top_k", "min_p"), [(0.8, -1, 0.0), (0.9, 5, 0.1), (1.0, 3, 0.3)])
def test_probabilities_equal_plain_python(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    choice.test_probabilities_equal_plain_python(temperature, top_p, top_k, min_p)
