from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch._inductor

from kdacompile.errors import (
    KdaError,
    ModeConflictError,
    OptionTypeError,
    OptionValueError,
    UnknownModeError,
    UnknownOptionError,
    UnsupportedModeError,
)
from kdacompile.settings import Settings, parse


def test_nothing_given_is_the_default() -> None:
    assert parse() == parse("default", {}) == Settings()
    assert parse().inductor_patches() == {}


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_becomes_inductors_own_patches_wherever_it_is_given(mode: str) -> None:
    expected = torch._inductor.list_mode_options(mode)
    assert expected
    assert parse(mode).inductor_patches() == expected
    assert parse(None, {"mode": mode}).inductor_patches() == expected
    assert parse(mode, {"mode": mode}).mode == mode


def test_own_options_are_parsed_and_the_rest_goes_to_inductor() -> None:
    settings = parse(
        None,
        {
            "kda.strict": True,
            "kda.expect": {"kda": 3, "gla": 1},
            "kda.verify": "wide",
            "kda.precision": "fp32",
            "kda.inner": "aot_eager",
            "kda.disable": ["retention", "gla", "gla"],
            "kda.lift": False,
            "max-autotune": True,
            "triton.cudagraphs": False,
        },
    )
    assert settings == Settings(
        strict=True,
        expect=(("gla", 1), ("kda", 3)),
        verify="wide",
        precision="fp32",
        inner="aot_eager",
        disable=("gla", "retention"),
        lift=False,
        inductor_options=(("max_autotune", True), ("triton.cudagraphs", False)),
    )
    assert settings.inductor_patches() == {"max_autotune": True, "triton.cudagraphs": False}


def test_options_win_over_the_mode() -> None:
    patches = parse("max-autotune", {"triton.cudagraphs": False}).inductor_patches()
    assert patches["triton.cudagraphs"] is False
    assert patches["max_autotune"] is True


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"kda.strct": True}, UnknownOptionError, r"'kda\.strct'; did you mean 'kda\.strict'"),
        ({"kda.qwerty": True}, UnknownOptionError, r"'kda\.qwerty'; kdacompile's options are .*kda\.verify"),
        ({"strict": True}, UnknownOptionError, r"did you mean 'kda\.strict'"),
        ({"max_autotun": True}, UnknownOptionError, "did you mean 'max_autotune'"),
        ({"no such thing": 1}, UnknownOptionError, "neither a kda"),
        ({3: 1}, OptionTypeError, "3"),
        ({"kda.strict": 1}, OptionTypeError, "True or False, got 1"),
        ({"kda.lift": "no"}, OptionTypeError, "True or False, got 'no'"),
        ({"kda.verify": "off"}, OptionValueError, "'standard', 'wide', got 'off'"),
        ({"kda.precision": "bf16"}, OptionValueError, "'match', 'fp32'"),
        ({"kda.inner": None}, OptionValueError, "'inductor', 'aot_eager', 'eager'"),
        ({"kda.expect": ["kda"]}, OptionTypeError, "a dict from pattern name to count"),
        ({"kda.expect": {"kda": True}}, OptionTypeError, "a dict from pattern name to count"),
        ({"kda.expect": {"kda": 0}}, OptionValueError, "at least 1"),
        ({"kda.expect": {"kdaa": 1}}, OptionValueError, "names of patterns .*gated_delta_rule"),
        ({"kda.disable": "kda"}, OptionTypeError, "a list of pattern names"),
        ({"kda.disable": ["kdaa"]}, OptionValueError, "'kdaa'"),
        ({"max_autotune": "yes"}, OptionTypeError, "of type bool"),
        ({"use_pre_grad_passes": False}, OptionValueError, "pre-grad passes off"),
    ],
)
def test_a_mistake_is_refused_by_name(options: dict[Any, Any], error: type[KdaError], says: str) -> None:
    with pytest.raises(error, match=says) as raised:
        parse(None, options)
    assert isinstance(raised.value, KdaError)


def test_modes_are_checked() -> None:
    with pytest.raises(UnknownModeError, match="max-autotune"):
        parse("fastest")
    with pytest.raises(UnsupportedModeError, match="pre-grad passes off"):
        parse("lite")
    with pytest.raises(ModeConflictError):
        parse("default", {"mode": "max-autotune"})


def test_the_users_options_are_left_as_they_are() -> None:
    options = {"mode": "default", "kda.strict": True}
    parse(None, options)
    assert options == {"mode": "default", "kda.strict": True}


def test_the_fingerprint_follows_every_setting_of_ours_and_nothing_else() -> None:
    plain = parse().fingerprint()
    own: list[dict[str, Any]] = [
        {"kda.strict": True},
        {"kda.expect": {"kda": 1}},
        {"kda.verify": "wide"},
        {"kda.precision": "fp32"},
        {"kda.inner": "eager"},
        {"kda.disable": ["kda"]},
        {"kda.lift": False},
    ]
    prints = [parse(None, options).fingerprint() for options in own]
    assert len({plain, *prints}) == len(own) + 1
    assert parse("max-autotune", {"epilogue_fusion": False}).fingerprint() == plain
    assert parse(None, {"kda.disable": ["gla", "kda"]}) == parse(None, {"kda.disable": ("kda", "gla")})
    fields = {field.name for field in dataclasses.fields(Settings)} - {"mode", "inductor_options"}
    assert {key.removeprefix("kda.") for key in json.loads(plain)} == fields
