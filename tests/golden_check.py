"""Compares a recorded run with one file of tests/golden/base/golden, tensor by tensor; no key goes unread."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from compare import assert_relative, assert_selections
from model_driver import Batch
from quickseek.model.causal_lm import CausalLM
from recorder import Recorder

INPUTS = ("ids", "positions", "logits_positions", "context", "anchor", "visible_context")
GAPS = re.compile(r".*(_gap|\.gap)$")
DRAFT_NAMES = {"collapsed": "draft.collapsed"}


class Run:
    """One prompt through a model in one step, with everything recorded."""

    def __init__(self, model: CausalLM, ids: Tensor, inputs_embeds: Tensor | None = None) -> None:
        self.batch = Batch(model)
        with Recorder(model) as recorder:
            self.logits = self.batch.run(ids, inputs_embeds=inputs_embeds)
        self.kept: Mapping[str, Tensor] = recorder.last


def compare_case(run: Run, want: Mapping[str, Tensor], tolerance: float, other_bins: float = 0.0) -> float:
    """AssertionError unless every tensor of a ``*.len*`` file is met and every selection equal.

    ``other_bins``: share of the elements of a quantised cache that may lie in another bin. Returns the largest relative
    error over the other tensors.
    """
    worst = 0.0
    every, some = want["logits_positions"], want["positions"]
    for name, expected in want.items():
        if name in INPUTS or GAPS.match(name) or name.endswith("_rows"):
            continue
        if name.endswith(("topk", "candidates", "router.index", "engram_hash")):
            compare_selection(run, name, expected, every)
            continue
        value = _values(run, name, expected, want, every, some)
        if other_bins and name.endswith(("compressed_kv", "index_k")):
            differing = ((value - expected).abs() > tolerance * expected.abs().max()).sum() / expected.numel()
            assert differing <= other_bins, f"{name}: {float(differing):.2%} of the elements differ"
            continue
        worst = max(worst, assert_relative(value, expected, tolerance, name))
    return worst


def compare_selection(run: Run, name: str, expected: Tensor, every: Tensor) -> None:
    """AssertionError unless the integers called ``name`` are equal: lists as sets, hashes and experts one by one."""
    ours = run.kept[name][every]
    if name.endswith("topk"):
        assert_selections(ours, expected, name)
    elif name.endswith("candidates"):
        assert_selections(_visible_groups(run, ours, every), _members(expected), name)
    else:
        assert torch.equal(ours, expected.to(torch.int64)), f"{name}: {int((ours != expected).sum())} entries differ"


def _values(
    run: Run, name: str, expected: Tensor, want: Mapping[str, Tensor], every: Tensor, some: Tensor
) -> Tensor:
    if name == "logits":
        return run.logits[every]
    if name == "embeddings":
        return run.batch.model.backbone.embed_input_ids(want["ids"][some])
    if name.endswith(("compressed_kv", "index_k")):
        rows = want.get(f"{name}_rows", torch.arange(expected.shape[0]))
        return run.batch.cache(name.replace("attn.compressed_kv", "global_kv").replace("attn.index_k", "index_k"), rows)
    value = run.kept[name]
    return value if value.shape[0] == expected.shape[0] else value[some]


def _members(mask: Tensor) -> Tensor:
    """The set columns of a mask [T, N] as lists padded with -1."""
    return torch.where(mask > 0, torch.arange(mask.shape[1]), -1)


def _visible_groups(run: Run, blocks: Tensor, positions: Tensor) -> Tensor:
    """Groups [T, N] of candidate blocks that each row can see, -1 elsewhere."""
    config = run.batch.model.config
    size, ratio = config.candidate_block_size, config.ratio(config.candidate_source_layer_id)
    groups = (blocks.unsqueeze(-1) * size + torch.arange(size)).masked_fill(blocks.unsqueeze(-1) < 0, -1).flatten(1)
    return torch.where(groups < ((positions + 1) // ratio).unsqueeze(1), groups, -1)


def compare_draft(run: Run, want: Mapping[str, Tensor], tolerance: float) -> float:
    """AssertionError unless the draft after ``run`` meets every tensor of a ``*.draft*`` file; the largest error."""
    model = run.batch.model
    with Recorder(model) as recorder:
        recorder.steps.append({})
        drafts = run.batch.draft([int(want["anchor"])])
    kept = recorder.last
    kept["main_x"] = run.kept["main_x"][-want["main_x"].shape[0] :]
    kept["logits"] = drafts.logits[0]
    kept["confidence_logit"] = torch.logit(drafts.confidence[0].to(torch.float64))
    assert drafts.tokens[0].tolist() == want["draft_tokens"].tolist(), "draft_tokens"
    worst = 0.0
    for name, expected in want.items():
        if name in (*INPUTS, "draft_tokens", "confidence_logit_normed_input") or GAPS.match(name):
            continue
        ours = kept[DRAFT_NAMES.get(name, name)]
        if name.endswith("router.index"):
            assert torch.equal(ours, expected.to(torch.int64)), name
        else:
            worst = max(worst, assert_relative(ours, expected, tolerance, name))
    return worst
