"""A guessed table fuses exactly, or is never trusted, whatever a toy module tries."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor, nn

from carpool.engine.fuse import Alone, Fuser
from carpool.engine.probation.kinds import QUORUM
from carpool.engine.probation.probation import Probation
from carpool.engine.probation.verdicts import Verdicts
from carpool.engine.specs import CONCAT, SPECS, STACK, Spec
from carpool.engine.specs.infer import covers
from support.fake_models import call_on, randn

WIDTH, TOKENS = 6, 5


class Described(NamedTuple):
    call: Any
    key: Any
    rows: int


class Toy(nn.Module):
    """Two layers over tokens, told apart by time; `quirk` may do anything to what it gives."""

    def __init__(self, quirk: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.quirk = quirk
        self.calls = 0
        self.last: Any = None
        self.register_buffer("place", torch.zeros(8, TOKENS, WIDTH))

    def forward(
        self,
        hidden_states: Tensor,  # (rows, TOKENS, WIDTH)
        timestep: Tensor,  # (rows,) or 0-d
        encoder_hidden_states: Tensor | None = None,  # (rows, any, WIDTH)
        ids: Tensor | None = None,  # (TOKENS,), shared
        flag: Any = None,
        return_dict: bool = False,
    ) -> tuple[Tensor]:
        time = timestep.expand(hidden_states.shape[0]).reshape(-1, 1, 1)
        x = torch.nn.functional.silu(self.inner(hidden_states)) * (1 + time)
        if encoder_hidden_states is not None:
            x = x + self.text(encoder_hidden_states).mean(dim=1, keepdim=True)
        if ids is not None:
            x = x + ids.reshape(1, -1, 1)
        if self.quirk is not None:
            x = self.quirk(self, x, timestep=timestep, flag=flag, given=hidden_states)
        return (x,)


class Trial:
    """Runs calls through a probation as the engine does, and knows what each gets alone."""

    def __init__(self, module: "Toy", verdicts: Verdicts | None = None) -> None:
        self.module, self.fuser = module, Fuser()
        module.eval()
        self.probation = Probation(self.fuser, infers=True, verdicts=verdicts)
        self.fused = 0  # forwards of several calls that answered somebody

    def run(self, calls: Sequence[dict[str, Any]]) -> list[Any]:
        """Answers; calls that fuse share a forward, in the order given."""
        made = [self.probation.infer_spec(call_on(self.module, **one)) for one in calls]
        described = []
        for call in made:
            key, rows = self.fuser.describe(call)
            if self.probation.runs_alone(call, key):
                key = Alone(call)
            described.append((call, key, rows))
        answers: dict[int, Any] = {}
        keys: dict[Any, list[int]] = {}
        for i, (_, key, _) in enumerate(described):
            keys.setdefault(key, []).append(i)
        run = self.probation.around(self._forward, self.fuser.fused)
        for places in keys.values():
            got = run([Described(*described[i]) for i in places])
            answers |= dict(zip(places, got, strict=True))
        return [answers[i] for i in range(len(calls))]

    def _forward(self, ready: Sequence[Described]) -> list[Any]:
        self.fused += len(ready) > 1
        return self.fuser.run([one.call for one in ready], [one.rows for one in ready])


def request(seed: int, rows: int = 1, time: float | None = None, **others: Any) -> dict[str, Any]:
    moment = 0.05 + 0.01 * (seed % 90) if time is None else time
    return {
        "hidden_states": randn(rows, TOKENS, WIDTH, seed=seed),
        "timestep": torch.full((rows,), moment),
        "encoder_hidden_states": randn(rows, 3, WIDTH, seed=seed + 1000),
        **others,
    }


def many(count: int, width: int = 3, **others: Any) -> list[list[dict[str, Any]]]:
    return [[request(10 * i + j, **others) for j in range(width)] for i in range(count)]


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def check(trial: Trial, rounds: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Run rounds of calls; the most that any answer is off what it is alone."""
    worst = 0.0
    for calls in rounds:
        alone = type(trial.module)(trial.module.quirk)  # of its own state
        alone.load_state_dict(trial.module.state_dict())
        alone.train(trial.module.training)
        expected = [alone(**one)[0].clone() for one in calls]
        for ours, theirs in zip(trial.run(calls), expected, strict=True):
            assert ours[0].shape == theirs.shape
            worst = max(worst, float((ours[0] - theirs).abs().max()))
    return worst


def why_alone(trial: Trial) -> str:
    return " ".join(line["why"] for line in trial.probation.report() if line["fuses"] == "alone")


def test_a_plain_module_is_trusted_after_a_few_forwards_and_then_fuses() -> None:
    trial = Trial(Toy())

    worst = check(trial, many(QUORUM))
    assert trial.fused == 0  # what was answered so far was run apart

    assert max(worst, check(trial, many(4))) < 1e-5
    assert trial.fused == 4
    assert trial.probation.forwards == {"agreed": QUORUM, "differed": 0, "unsettled": 0}


def mixes(module: Any, x: Tensor, **_: Any) -> Tensor:
    return x + 1e-6 * x.mean(dim=0, keepdim=True)


def mixes_above_two(module: Any, x: Tensor, **_: Any) -> Tensor:
    return x + 0.1 * x.sum(dim=0) if x.shape[0] > 2 else x


def mixes_under_a_flag(module: Any, x: Tensor, *, flag: Any, **_: Any) -> Tensor:
    return x + 0.1 * x.flip(0) if flag else x


def reads_row_0_of_time(module: Any, x: Tensor, *, timestep: Tensor, **_: Any) -> Tensor:
    return x + timestep.reshape(-1)[0]


def decides_by_the_first_time(module: Any, x: Tensor, *, timestep: Tensor, **_: Any) -> Tensor:
    return x * 2 if float(timestep.reshape(-1)[0]) > 0.5 else x


def decides_by_all_times(module: Any, x: Tensor, *, timestep: Tensor, **_: Any) -> Tensor:
    return x * 2 if bool((timestep > 0.5).any()) else x


def decides_in_tensors(module: Any, x: Tensor, *, timestep: Tensor, **_: Any) -> Tensor:
    return torch.where(timestep.reshape(-1).max() > 0.5, x * 2, x)


def counts(module: Any, x: Tensor, **_: Any) -> Tensor:
    module.calls += 1
    return x


def remembers(module: Any, x: Tensor, **_: Any) -> Tensor:
    before, module.last = module.last, x
    return x if before is None or before.shape != x.shape else x + 0.5 * before


def draws(module: Any, x: Tensor, **_: Any) -> Tensor:
    return x + torch.randn_like(x)


def writes_into_its_input(module: Any, x: Tensor, *, given: Tensor, **_: Any) -> Tensor:
    given.mul_(0.5)
    return x


def gives_its_input(module: Any, x: Tensor, *, given: Tensor, **_: Any) -> Tensor:
    return given[:, :]


def gives_a_buffer(module: Any, x: Tensor, **_: Any) -> Tensor:
    place: Tensor = module.place[: x.shape[0]]
    place.copy_(x)
    return place


def fails_together(module: Any, x: Tensor, **_: Any) -> Tensor:
    if x.shape[0] > 2:
        raise ValueError("one at a time")
    return x


HOSTILE: list[Callable[..., Tensor]] = [
    mixes, mixes_above_two, reads_row_0_of_time, decides_by_the_first_time, decides_by_all_times,
    decides_in_tensors, writes_into_its_input, gives_its_input, fails_together,
]  # fmt: skip


@pytest.mark.parametrize("quirk", HOSTILE, ids=lambda one: one.__name__)
def test_a_module_that_must_not_fuse_never_answers_from_a_forward_of_several(quirk: Any) -> None:
    trial = Trial(Toy(quirk))
    lockstep = [[request(10 * i + j, time=0.2) for j in range(3)] for i in range(6)]
    early = [[request(10 * i + j, time=0.01 * j) for j in range(3)] for i in range(6)]

    if quirk is writes_into_its_input:
        for calls in many(6):
            trial.run(calls)
    else:
        assert check(trial, [*lockstep, *early, *many(6), *many(6, width=4)]) < 1e-5
    assert why_alone(trial)


def test_a_module_that_mixes_above_two_rows_may_fuse_two() -> None:
    trial = Trial(Toy(mixes_above_two))

    assert check(trial, many(QUORUM + 1, width=2)) < 1e-5
    assert trial.fused == 1
    assert check(trial, [*many(2, width=3), *many(2, width=2)]) < 1e-5
    assert trial.fused == 1  # three showed it: not even two fuse any more


def test_a_flag_that_turns_mixing_on_is_caught_when_it_comes() -> None:
    trial = Trial(Toy(mixes_under_a_flag))

    assert check(trial, many(QUORUM + 2, flag=False)) < 1e-5
    assert trial.fused == 2
    assert check(trial, many(5, flag=True)) < 1e-5
    assert trial.fused == 2
    assert check(trial, many(2, flag=False)) < 1e-5
    assert trial.fused == 4  # without the flag it still does


def test_reading_one_row_is_caught_even_where_all_rows_are_alike_at_first() -> None:
    trial = Trial(Toy(lambda module, x, timestep, **_: x + timestep.reshape(-1, 1, 1)[:1]))

    lockstep = [[request(10 * i + j, time=0.2) for j in range(3)] for i in range(6)]

    assert check(trial, [*lockstep, *many(5)]) < 1e-5
    assert "reads some rows" in why_alone(trial)


@pytest.mark.parametrize("quirk", [counts, remembers], ids=lambda one: one.__name__)
def test_a_module_that_keeps_state_is_given_up(quirk: Any) -> None:
    trial = Trial(Toy(quirk))

    for calls in many(6):
        trial.run(calls)

    assert trial.fused == 0
    assert "keeps state" in why_alone(trial)


def test_a_cache_that_fills_once_does_no_harm() -> None:
    def fills(module: Any, x: Tensor, **_: Any) -> Tensor:
        if module.last is None:
            module.last = torch.arange(WIDTH) * 1.0
        return x + module.last  # type: ignore[no-any-return]

    trial = Trial(Toy(fills))

    assert check(trial, many(QUORUM + 3)) < 1e-5
    assert trial.fused == 2


class Normed(Toy):
    """Its weight is made anew, from a length and a direction, each time it is called."""

    def __init__(self, quirk: Callable[..., Tensor] | None = None) -> None:
        super().__init__(quirk)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(self.inner)


def test_a_weight_that_is_made_anew_of_parameters_is_no_state() -> None:
    trial = Trial(Normed())

    assert check(trial, many(QUORUM + 2)) < 1e-5
    assert why_alone(trial) == ""
    assert trial.fused == 2


def test_random_numbers_are_noticed_and_the_generator_goes_on_as_it_would() -> None:
    trial, calls = Trial(Toy(draws)), many(1)[0]
    torch.manual_seed(3)
    expected = [Toy.forward(trial.module, **one)[0] for one in calls]
    torch.manual_seed(3)

    got = trial.run(calls)

    assert all(torch.equal(a[0], b) for a, b in zip(got, expected, strict=True))
    assert why_alone(trial) == "draws random numbers"


def test_dropout_in_training_mode_is_noticed() -> None:
    module = Toy(lambda module, x, **_: nn.functional.dropout(x, 0.5, module.training))
    trial = Trial(module)
    assert check(trial, many(QUORUM + 1)) < 1e-5
    assert trial.fused == 1

    module.train()
    trial.run(many(1)[0])

    assert trial.fused == 1
    assert "draws random numbers" in why_alone(trial)


def test_a_buffer_that_is_given_again_and_again_answers_each_call_with_its_own() -> None:
    trial = Trial(Toy(gives_a_buffer))
    calls = many(1)[0]
    expected = [Toy()(**one)[0] for one in calls]

    got = trial.run(calls)

    assert all(torch.equal(a[0], b) for a, b in zip(got, expected, strict=True))
    assert "overwrites" in why_alone(trial)


class Rotated(Toy):
    """Takes tensors in tuples of tuples, one for all rows: as Allegro does."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, rotary: Any) -> tuple[Tensor]:  # type: ignore[override]
        (cos, sin), grid = rotary
        x = super().forward(hidden_states, timestep)[0]
        return (x * cos + sin * grid[0],)


def test_tensors_deep_in_tuples_are_shared_by_calls_whose_tensors_are_equal() -> None:
    def calls(i: int, others: float) -> list[dict[str, Any]]:
        made = [request(10 * i + j) for j in range(3)]
        for j, one in enumerate(made):
            del one["encoder_hidden_states"]
            cos = torch.full((TOKENS, 1), 1.0 if j < 2 else others)
            one["rotary"] = (cos, torch.ones(TOKENS, 1)), [torch.tensor([0.5])]
        return made

    trial = Trial(Rotated())

    assert check(trial, [calls(i, 1.0) for i in range(QUORUM + 2)]) < 1e-5
    assert trial.fused == 2
    assert check(trial, [calls(i, 2.0) for i in range(3)]) < 1e-5
    assert trial.fused == 2 + 2  # the two that are equal: proven first, as is any new width


class Framed(Toy):
    """Takes a list of tensors with frames folded into the rows: as AnimateDiff's UNet does."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, residuals: Any) -> tuple[Tensor]:  # type: ignore[override]
        x = super().forward(hidden_states, timestep)[0]
        return (x + sum(one.reshape(x.shape[0], TOKENS, -1) for one in residuals),)


def test_a_list_of_tensors_with_frames_in_their_rows_is_joined() -> None:
    batches = many(QUORUM + 2)
    for i, one in enumerate(one for batch in batches for one in batch):
        del one["encoder_hidden_states"]
        one["residuals"] = [randn(TOKENS, WIDTH, 1, seed=900 + i + j) for j in range(2)]
    trial = Trial(Framed())

    assert check(trial, batches) < 1e-5
    assert trial.fused == 2


class Placed(Toy):
    """Takes ids with a row axis, and reads row 0 of them: as FLUX.2 does."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, ids: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(hidden_states, timestep)[0] + ids[0],)


def test_what_looks_stacked_and_is_shared_is_found_by_the_second_guess() -> None:
    trial = Trial(Placed())
    one, other = (randn(1, TOKENS, WIDTH, seed=seed) for seed in (5, 6))

    def calls(i: int, *ids: Tensor) -> list[dict[str, Any]]:
        given = [request(10 * i + j) for j in range(len(ids))]
        return [
            {"hidden_states": g["hidden_states"], "timestep": g["timestep"], "ids": v}
            for g, v in zip(given, ids, strict=True)
        ]

    rounds = [calls(i, one, other, one, other) for i in range(8)]
    alone = Placed()
    for some in rounds:
        for got, expected in zip(trial.run(some), [alone(**one)[0] for one in some], strict=True):
            assert torch.allclose(got[0], expected, atol=1e-5)

    assert trial.fused > 0


class Masked(Toy):
    """Repeats a mask for all rows, and asks one row for its device: as Cosmos and Lumina do."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        padding_mask: Tensor,  # (1, TOKENS, 1)
        condition: Tensor,  # (rows, TOKENS, 1)
        places: Any,  # two of (2, WIDTH)
    ) -> tuple[Tensor]:
        rows, device = hidden_states.shape[0], hidden_states[0].device
        x = super().forward(hidden_states, timestep)[0] + padding_mask.repeat(rows, 1, 1)
        return (x + condition + places[0].sum(dim=0).to(device) - places[1].sum(dim=0),)


@pytest.mark.parametrize("rows", [1, 2])
def test_what_looks_stacked_by_chance_and_is_equal_in_all_calls_is_shared(rows: int) -> None:
    trial = Trial(Masked())
    shared = {
        "padding_mask": torch.ones(1, TOKENS, 1),
        "places": (randn(2, WIDTH, seed=5), randn(2, WIDTH, seed=6)),
    }
    rounds = many(QUORUM + 6, rows=rows)
    for number, calls in enumerate(rounds):
        for place, call in enumerate(calls):
            del call["encoder_hidden_states"]
            call |= shared
            seed = 50 * number + place if number else 0  # at first equal, too
            call["condition"] = randn(rows, TOKENS, 1, seed=seed)

    assert check(trial, rounds) < 1e-5
    assert trial.fused > 0
    assert why_alone(trial) == ""


class Popping(Toy):
    """Takes what is added out of a list, as diffusers' UNet does of a T2I-adapter's."""

    def forward(self, hidden_states: Tensor, timestep: Tensor, residuals: Any) -> tuple[Tensor]:  # type: ignore[override]
        x = super().forward(hidden_states, timestep)[0]
        while residuals:
            x = x + residuals.pop(0)
        return (x,)


def test_a_forward_may_take_entries_out_of_a_list() -> None:
    rounds = many(QUORUM + 2)
    trial, lists = Trial(Popping()), []
    for number, calls in enumerate(rounds):
        for place, call in enumerate(calls):
            del call["encoder_hidden_states"]
            seed = 900 + 10 * number + place
            call["residuals"] = [randn(1, TOKENS, WIDTH, seed=seed + 100 * i) for i in range(2)]
            lists.append(call["residuals"])
        alone = Popping().eval()
        own = [{**call, "residuals": list(call["residuals"])} for call in calls]
        for answer, reference in zip(trial.run(calls), [alone(**c)[0] for c in own], strict=True):
            assert torch.allclose(answer[0], reference, atol=1e-5)

    assert trial.fused == 2
    assert not any(lists)  # as alone


def test_verdicts_are_remembered_for_the_same_code_and_config(tmp_path: Path) -> None:
    file, versions = tmp_path / "costs.fusing.json", {"torch": "1"}
    first = Trial(Toy(), Verdicts(file, versions))
    check(first, many(QUORUM))
    spoiled = Trial(Toy(mixes), Verdicts(file, {"torch": "2"}))
    check(spoiled, many(1))
    first.probation.keep()

    again = Trial(Toy(), Verdicts(file, versions))
    check(again, many(2))
    updated = Trial(Toy(), Verdicts(file, {"torch": "3"}))
    check(updated, many(2))

    assert (again.fused, updated.fused) == (2, 0)


def test_a_file_of_verdicts_that_is_none_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "costs.fusing.json"
    file.write_text('{"fusing": [1, 2')

    trial = Trial(Toy(), Verdicts(file))
    check(trial, many(QUORUM))
    trial.probation.keep()

    assert "starts empty" in caplog.text
    assert Verdicts(file).read("no such", "kind") is None


QUIRKS: list[Any] = [None, *HOSTILE[:6], mixes_under_a_flag, gives_its_input, fails_together]
calls = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([0.1, 0.3, 0.7, None]), st.booleans()),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25)
@given(st.sampled_from(QUIRKS), st.lists(calls, min_size=4, max_size=9))
def test_a_guess_fuses_exactly_or_is_never_trusted(quirk: Any, rounds: list[Any]) -> None:
    trial = Trial(Toy(quirk))
    made = [
        [request(20 * i + j, rows, time, flag=flag) for j, (rows, time, flag) in enumerate(some)]
        for i, some in enumerate(rounds)
    ]

    assert check(trial, made) < 1e-5
    if quirk not in (None, mixes_under_a_flag, mixes_above_two):
        assert trial.fused == 0


def test_a_table_covers_a_call_only_if_it_says_what_each_of_its_tensors_means() -> None:
    spec = SPECS["UNet2DConditionModel", "forward"]
    one, row = torch.ones(2, 4, 8, 8), torch.ones(2, 7)
    plain = {"sample": one, "timestep": 3, "encoder_hidden_states": row, "added_cond_kwargs": None}

    assert covers(spec, plain)
    assert covers(spec, {**plain, "added_cond_kwargs": {"image_embeds": [row]}})
    assert not covers(spec, {**plain, "added_cond_kwargs": {"image_embeds": row}})  # Kandinsky 2.2
    assert not covers(spec, {**plain, "class_labels": row})
    assert not covers(spec, {**plain, "cross_attention_kwargs": {"gligen": {"boxes": row}}})


def test_a_call_outside_of_its_table_fuses_once_it_has_proven_itself() -> None:
    trial = Trial(Framed())
    table = Spec(rows="hidden_states", rules={"hidden_states": STACK, "timestep": STACK})
    call = call_on(trial.module, **request(1), residuals=[randn(TOKENS, WIDTH, 1, seed=1)])
    with_table = structs.replace(call, target=replace(call.target, spec=table))

    guessed = trial.probation.infer_spec(with_table).target.spec

    assert guessed is not None
    assert guessed.is_inferred
    assert guessed.rules["residuals"] is CONCAT
