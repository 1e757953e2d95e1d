"""The mailbox protocols under a model checker (spec/decode.md L.3 b): what passes, what fails, and every mutant caught.

Figures in comments are distinct states. The searches behind the ``slow`` marker repeat the small ones at larger sizes.
"""

import random
from dataclasses import replace

import pytest
from protocol_parts import Adversary
from protocol_programs import Design, calls
from protocol_search import explore, walk

AT_ONCE, BY_COMPLETION, ONE_CALL_LATE, TWO_CALLS_LATE = (Adversary(clears_late=late) for late in (None, 0, 1, 2))
PROTOCOLS = {"one-shot": "LLLLL", "two-shot": "BBBBB", "fused": "FFFFF", "gather": "GGGGG", "mixed": "BLFLFB"}

# ------------------------------------------------------------------------------------ the protocols as specified


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kinds", PROTOCOLS.values(), ids=PROTOCOLS)
def test_generations_that_are_safe_and_one_fewer_that_is_not(kinds, ranks):
    """Three generations bear clears that are one call late, two bear none, one is never safe."""
    design = Design(ranks, calls(kinds, 1), atoms=2 if ranks == 2 else 1)
    for generations, adversary, safe in (
        (3, BY_COMPLETION, True),
        (3, ONE_CALL_LATE, True),
        (3, TWO_CALLS_LATE, False),
        (2, AT_ONCE, True),
        (2, BY_COMPLETION, True),
        (2, ONE_CALL_LATE, False),
        (1, AT_ONCE, False),
        (1, BY_COMPLETION, False),
    ):
        report = explore(replace(design, generations=generations).machine(adversary))
        assert report.passed == safe, (generations, adversary, report)
        assert report.complete and (safe or set(report.broken) <= {"I2", "I3"})


@pytest.mark.parametrize("adversary", [Adversary(flush, late) for flush in (True, False) for late in (None, 0, 1)])
@pytest.mark.parametrize(("ranks", "kinds", "rows"), [(2, "LLLL", (2, 1)), (2, "BBBB", (1, 2)), (2, "GGGG", (2, 1, 1))])
def test_changing_rows_and_sibling_threads_pass_with_any_adversary(ranks, kinds, rows, adversary):
    design = Design(ranks, calls(kinds, *rows))
    assert explore(design.machine(adversary)).passed
    assert not explore(replace(design, clear="none").machine(adversary)).passed


@pytest.mark.parametrize("kinds", ["LLLL", "BBB", "GGGG"])
def test_without_any_reduction_every_interleaving_of_two_ranks_passes(kinds):
    """6,000 to 55,000 states: each atom lands, is read and is cleared on its own."""
    design = Design(2, calls(kinds, 1))
    assert explore(design.machine(AT_ONCE), reduced=False).passed
    assert explore(design.machine(BY_COMPLETION), reduced=False).passed
    assert not explore(replace(design, generations=1).machine(BY_COMPLETION), reduced=False).passed


@pytest.mark.parametrize("options", [{"arrive": "end"}, {"keeps_own": True}, {"keeps_own": True, "looped": True}])
def test_every_form_of_the_single_kernel_passes_beside_the_two_kernel_form(options):
    """Fused and two-kernel one-shot calls share a mailbox and its NEXT."""
    for kinds in ("FLF", "GGG"):
        design = Design(2, calls(kinds, 1, 2), **options)
        assert explore(design.machine(ONE_CALL_LATE)).passed
        assert not explore(replace(design, generations=1).machine(ONE_CALL_LATE)).passed


@pytest.mark.parametrize("kinds", ["LLL", "BBB", "LBL", pytest.param("FF", marks=pytest.mark.slow)])
def test_three_ranks_with_changing_rows_pass(kinds):
    design = Design(3, calls(kinds, 1, 2), atoms=1)
    assert explore(design.machine(ONE_CALL_LATE)).passed
    assert not explore(replace(design, generations=1, calls=calls("LLL", 1, 2)).machine(ONE_CALL_LATE)).passed


def test_two_fragments_of_one_token_pass():
    design = Design(2, calls("LBLB", 1), fragments=2)
    assert explore(design.machine(ONE_CALL_LATE)).passed
    assert not explore(replace(design, generations=1).machine(ONE_CALL_LATE)).passed


def test_the_reduced_search_reaches_the_verdicts_of_the_full_one():
    """The reduction is an argument in a docstring; this holds it against the full search, verdict by verdict."""
    verdicts = set()
    for kinds, rows in (("LLL", 1), ("BBB", 1), ("GGG", 1), ("LL", 2)):
        for generations in (1, 2, 3):
            races = ({"advance": "first"},) if kinds == "GGG" else ({"advance": "publish"}, {"one_word": True})
            for fault in ({}, {"clear": "none"}, {"clear": "next"}, *races):
                design = Design(2, calls(kinds, rows), generations=generations, atoms=1, **fault)
                machine = design.machine(BY_COMPLETION if rows == 1 else AT_ONCE)
                full = explore(machine, reduced=False, stop=True)
                quick = explore(machine, stop=True)
                assert full.complete and quick.complete
                assert bool(full.broken) == bool(quick.broken), (design, full, quick)
                verdicts.add(bool(full.broken))
    assert verdicts == {True, False}


# ------------------------------------------------------------------------------------------------------- mutants

ONE_ROW, TWO_ROWS = Design(2, calls("LLLLL", 1)), Design(2, calls("LLLL", 2))
BOTH = Design(2, calls("LBLLBB", 2))
MUTANTS = {
    "no clear": (ONE_ROW, {"clear": "none"}, "I2"),
    "clear of the next generation instead of the own": (ONE_ROW, {"clear": "next"}, "I5"),
    "clear of the next generation, lazily": (ONE_ROW, {"clear": "next, lazily"}, "I5"),
    "NEXT advanced by publish": (TWO_ROWS, {"advance": "publish"}, "I5"),
    "one state word instead of two": (TWO_ROWS, {"one_word": True}, "I1 I5"),
    "poll looks at the first half of a word": (ONE_ROW, {"poll": "first half"}, "I1"),
    "poll looks at the first word of a pack": (replace(ONE_ROW, atoms=4), {"poll": "first word"}, "I1"),
    "payload loaded again after the poll": (ONE_ROW, {"reload": "weak"}, "I1"),
    "rows differ on one rank": (TWO_ROWS, {"rows_of": (1, 1, 1)}, "I5"),
    "rows differ on one rank, two-shot": (replace(TWO_ROWS, calls=calls("BBB", 3)), {"rows_of": (0, 1, 1)}, "I5"),
    "owner by blocks on one rank": (Design(2, calls("BBB", 3)), {"blocked_owner": 1}, "I1"),
    "one-shot and two-shot share mailboxes": (BOTH, {"shared": frozenset({"memory"})}, "I2"),
    "one-shot and two-shot share mailboxes and words": (BOTH, {"shared": frozenset({"memory", "words"})}, "I2"),
    "publish reads NEXT before its grid wait": (ONE_ROW, {"early": "publish"}, "I2"),
    "consumer reads ACTIVE before its grid wait": (ONE_ROW, {"early": "collect"}, "I5"),
    "owner reads ACTIVE before its grid wait": (Design(2, calls("BBBB", 1)), {"early": "reduce"}, "I5"),
    "the first thread of a gather advances": (Design(2, calls("GG", 2)), {"advance": "first"}, "I2 I4 I5"),
    "the first thread of a fused kernel advances": (Design(2, calls("FLF", 2)), {"advance": "first"}, "I2 I4 I5"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_caught_by_the_search_and_by_random_walks(name):
    design, fault, invariants = MUTANTS[name]
    mutant = replace(design, **fault).machine(BY_COMPLETION)
    walked = walk(mutant, 200, seed=1)
    assert walked.broken
    if mutant.only_waits:
        found = explore(mutant)
        assert set(found.broken) & set(invariants.split()), found
    else:
        assert set(walked.broken) == {invariants}, walked
    # Negative control: the design without the fault passes both.
    right = design.machine(BY_COMPLETION)
    assert not walk(right, 20, seed=1).broken
    assert explore(right).passed


@pytest.mark.parametrize("kinds", ["LLLL", "BBB", "GGG"])
def test_rows_that_differ_on_one_rank_end_in_a_wait_and_never_in_a_result(kinds):
    design = Design(2, calls(kinds, 3 if kinds == "BBB" else 2), atoms=1)
    report = explore(replace(design, rows_of=(1, 1, 1)).machine(BY_COMPLETION), stop=False)
    assert report.complete and report.finished == 0 and set(report.broken) == {"I5"}
    assert explore(design.machine(BY_COMPLETION)).passed


def test_each_mutant_of_a_race_is_harmless_without_what_it_races_with():
    """What catches these is the sibling threads and the weak load, not some other flaw of the mutant."""
    for fault in ({"advance": "publish"}, {"one_word": True}):
        assert explore(replace(ONE_ROW, **fault).machine(BY_COMPLETION)).passed
        assert not explore(replace(TWO_ROWS, **fault).machine(BY_COMPLETION)).passed
    short = Design(2, calls("LL", 1), atoms=1)
    assert explore(replace(short, reload="volatile").machine(BY_COMPLETION)).passed
    assert not explore(replace(short, reload="weak").machine(BY_COMPLETION)).passed


def test_lazy_clearing_is_right_for_the_generation_of_the_call_before_only():
    """All but I4 holds: the last call's payload stays until a next call."""
    lazy = replace(ONE_ROW, clear="previous, lazily")
    report = explore(lazy.machine(BY_COMPLETION), stop=False)
    assert report.complete and set(report.broken) == {"I4"}
    report = explore(replace(lazy, clear="next, lazily").machine(BY_COMPLETION), stop=False)
    assert "I5" in report.broken


def test_sharing_the_state_words_alone_changes_nothing():
    """What one-shot and two-shot must have apart is the memory: calls of either kind order those of the other."""
    for kinds, rows in (("LBLLBB", 1), ("LBBL", 2)):
        design = Design(2, calls(kinds, rows), shared=frozenset({"words"}))
        assert explore(design.machine(ONE_CALL_LATE)).passed
        assert not explore(replace(design, generations=1).machine(ONE_CALL_LATE)).passed


# -------------------------------------------------------------------------------------------------- random designs


def random_design(seed: int, longest: int = 6) -> tuple[Design, Adversary]:
    """Ranks, sizes, kinds and rows of any mixture, and an adversary that three generations must bear."""
    chance = random.Random(seed)
    kinds = "".join(chance.choice("LLBBFG") for _ in range(chance.randint(4, longest)))
    kinds += kinds[-1]  # two calls of one kind in a row, for a single generation to fail on
    rows = [chance.randint(1, 4) for _ in kinds]
    own, looped = chance.random() < 0.5, chance.random() < 0.5
    sizes = {"fragments": chance.choice((1, 1, 2)), "keeps_own": own, "looped": looped}
    design = Design(chance.choice((2, 3, 4)), calls(kinds, *rows), **sizes)
    return design, Adversary(chance.random() < 0.5, chance.choice((None, 0, 1)))


def test_random_mixtures_pass_random_walks_and_fail_them_with_one_generation():
    caught = 0
    for seed in range(12):
        design, adversary = random_design(seed)
        assert not walk(design.machine(adversary), 2, seed).broken, (design, adversary)
        caught += bool(walk(replace(design, generations=1).machine(adversary), 4, seed).broken)
    assert caught >= 10


@pytest.mark.slow
def test_many_random_mixtures_pass_many_random_walks():
    missed = 0
    for seed in range(1000, 1100):
        design, adversary = random_design(seed, longest=9)
        assert not walk(design.machine(adversary), 10, seed).broken, (design, adversary)
        missed += not walk(replace(design, generations=1).machine(adversary), 30, seed).broken
    assert missed <= 4


@pytest.mark.slow
@pytest.mark.parametrize("adversary", [Adversary(flush, late) for flush in (True, False) for late in (0, 1)])
@pytest.mark.parametrize(
    ("ranks", "kinds", "rows"),
    [(2, "LLLLLLL", 2), (2, "LBLFLBB", 2), (3, "LLLL", 2), (3, "LBLLB", 2), (3, "FFFF", 1), (3, "GGGG", 1)],
)
def test_larger_machines_pass_exhaustively(ranks, kinds, rows, adversary):
    design = Design(ranks, calls(kinds, rows), atoms=2 if ranks == 2 else 1)
    assert explore(design.machine(adversary), limit=4_000_000).passed
    assert not explore(replace(design, generations=1).machine(adversary)).passed


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["LLLL", "BBBB", "GGGG"])
@pytest.mark.parametrize("adversary", [Adversary(flush, late) for flush in (True, False) for late in (0, 1)])
def test_without_any_reduction_late_clears_and_late_stores_pass_too(kinds, adversary):
    design = Design(2, calls(kinds, 1), atoms=1 if adversary.clears_late else 2)
    assert explore(design.machine(adversary), reduced=False, limit=4_000_000).passed
    assert not explore(replace(design, generations=1).machine(adversary), reduced=False).passed
