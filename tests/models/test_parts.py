"""The grammar of parts of other libraries, and which are accepted; no library is imported."""

from __future__ import annotations

import dataclasses
import sys

import pytest

import hpctrain as hp
from scripts.parts import to_toml
from tests.support.api import find_part, own_functions, parts, require_trust
from tests.support.launch import run


@pytest.mark.parametrize(
    ("arguments", "args", "kwargs"),
    [
        ("", (), {}),
        ("()", (), {}),
        ("(15)", (15,), {}),
        ("(-1.5, degrees=(1, 2))", (-1.5,), {"degrees": (1, 2)}),
        ("(padding_mode=reflection)", (), {"padding_mode": "reflection"}),
        ("(a='b c', d=[True, None, 1e-3])", (), {"a": "b c", "d": [True, None, 1e-3]}),
        ("(a={left: 1, 'right': -2})", (), {"a": {"left": 1, "right": -2}}),
        ("(degrees='(1), 2=3')", (), {"degrees": "(1), 2=3"}),
    ],
)
def test_arguments_are_literals_and_bare_words_are_texts(arguments, args, kwargs):
    part = find_part("augment", f"kornia:RandomAffine{arguments}")
    assert (part.library, part.name, part.args, part.kwargs) == (
        "kornia",
        "RandomAffine",
        args,
        kwargs,
    )
    assert part.flag == f"--augment kornia:RandomAffine{arguments}"


def refusal(setting, text):
    """The one line with which a part is refused, without the beginning that names it."""
    with pytest.raises(hp.UsageError) as caught:
        find_part(setting, text)
    line = str(caught.value)
    assert line.startswith(f"--{setting} ") and "\n" not in line and len(line) < 1000
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("(degrees=15", "write kornia:Name(argument=value, ...)"),
        ("(degrees=15) + 1", "write kornia:Name(argument=value, ...)"),
        (".rotated()", "write kornia:Name(argument=value, ...)"),
        ("(degrees=1)(2)", "the parentheses do not match"),
        ("(degrees=)", "invalid syntax"),
        ("(a\n=1)", "in one line"),
        (f"({'1,' * 500})", "at most 1,000 characters"),
        ("(degrees=1, degrees=2)", "degrees is given twice"),
        ("(p=true)", "write True in place of true"),
        ("(p=null)", "write None in place of null"),
        ("(p=1e999)", "a number is larger than float64 can hold"),
        ("(-1e999)", "a number is larger than float64 can hold"),
        ("(p=2**9)", "2 ** 9 is no literal"),
        ("(p=__import__('os'))", "__import__('os') is no literal"),
        ("(p=torch.float32)", "torch.float32 is no literal"),
        ("(p=a-b)", "a - b is no literal (quote texts"),
        ("(p=f'{x}')", "is no literal"),
        ("(p=b'x')", "is no literal"),
        ("(p={1, 2})", "is no literal"),
        ("(p={**x})", "is no literal"),
        ("(p={[1]: 2})", "keys of a dict are numbers and texts"),
        ("(p={(1, [2]): 2})", "keys of a dict are numbers and texts"),
        ("(*x)", "*x is no literal"),
        ("(**{'p': 1})", "** is not for arguments of parts"),
        ("(p='\\d')", "invalid escape sequence"),
        ("(p=1if 2else 3)", "invalid"),
        (f"(p={'[' * 400}{']' * 400})", ""),
        (f"(p={'-' * 900}1)", ""),
        (f"(p={'9' * 5000})", ""),
    ],
)
def test_whatever_is_no_literal_is_refused_in_one_line(arguments, said):
    assert said in refusal("augment", f"kornia:RandomAffine{arguments}")


@pytest.mark.parametrize(
    ("setting", "text", "said"),
    [
        ("augment", "kornia:RandomAfine(1)", "did you mean 'RandomAffine'?"),
        ("augment", "kornia:Xyz", "there are AutoAugment, "),
        ("augment", "kornia:RandomMixUpV2()", "RandomMixUpV2 is refused: it mixes samples"),
        ("metric", "torchmetrics:MulticlassROC", "MulticlassROC is refused: it gives a curve"),
        ("metric", "torchmetrics:PeakSignalNoiseRatio()", "metrics of images are not accepted"),
        ("model", "smp:Unett()", "did you mean 'Unet'?"),
    ],
)
def test_names_outside_the_table_are_refused(setting, text, said):
    assert said in refusal(setting, text)


@pytest.mark.parametrize(
    ("setting", "text", "said"),
    [
        ("model", "timm:resnet10t.c3_in1k(pretrained=True)", "pretrained is refused"),
        ("model", "timm:resnet10t(pretrained_cfg={})", "pretrained_cfg is refused"),
        ("model", "timm:resnet10t(checkpoint_path=a)", "checkpoint_path is refused"),
        ("model", "timm:resnet10t(weights=a)", "weights is refused"),
        ("model", "smp:Unet(encoder_weights=None)", "encoder_weights is refused"),
        ("model", "smp:Unet(encoder_name='tu-hf-hub:a')", "could be a path or an address"),
        ("model", "timm:resnet10t(a=[{'b': ('../c',)}])", "could be a path or an address"),
        ("model", "timm:resnet10t(a={'b\\\\c': 1})", "could be a path or an address"),
        ("augment", "kornia:RandomAffine(cache_dir=a)", "cache_dir is refused"),
        ("metric", "torchmetrics:MulticlassAUROC(process_group=1)", "process_group is refused"),
        ("metric", "torchmetrics:MulticlassAUROC(dist_sync_fn=1)", "dist_sync_fn is refused"),
        ("metric", "torchmetrics:MulticlassAUROC(sync_on_compute=1)", "sync_on_compute is"),
        ("metric", "torchmetrics:MulticlassAUROC(distributed_available_fn=1)", "is refused"),
        ("optimizer", "torch:NAdam(fused=True)", "fused is refused"),
        ("optimizer", "torch:NAdam(capturable=True)", "capturable is refused"),
    ],
)
def test_arguments_that_read_files_or_use_other_ranks_are_refused(setting, text, said):
    assert said in refusal(setting, text)


def test_harmless_arguments_of_like_names_are_accepted():
    find_part("metric", "torchmetrics:BinaryCohenKappa(weights=linear)")
    find_part("augment", "kornia:RandomPerspective(distortion_scale=0.2)")


def test_a_text_is_a_part_of_its_setting_alone(in_empty_folder):
    assert parts.is_part("augment", "kornia:RandomAffine") and parts.is_part(
        "model", "timm:resnet10t"
    )
    assert not parts.is_part("augment", "kornia.augmentation:RandomAffine")
    assert not parts.is_part("model", "resnet18") and not parts.is_part("data", "torch:x")
    with pytest.raises(hp.UsageError, match=r"no parts of kornia are known for it; .* torch:"):
        hp.train(loss="kornia:RandomAffine(degrees=15)")


@pytest.fixture
def in_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_parts_need_no_trust_and_functions_do():
    named = dict(parts.EXAMPLES)
    require_trust(named, "recipe.toml", trust_code=False)
    both = {**named, "augment": [parts.EXAMPLES["augment"], "mine:f"], "optimizer": "mine:g"}
    assert own_functions(both) == ["mine:f", "mine:g"]
    with pytest.raises(hp.UsageError, match="recipe.toml names mine:f, mine:g: "):
        require_trust(both, "recipe.toml", trust_code=False)


def test_settings_of_several_texts_are_one_text_or_a_list_in_files():
    config = hp.Config(augment=["mine:a", test_parts_need_no_trust_and_functions_do])
    function = f"{__name__}:test_parts_need_no_trust_and_functions_do"
    assert config.augment == ("mine:a", function)
    assert config.changed() == {"augment": ["mine:a", function]}
    assert dataclasses.replace(config, augment="mine:a").changed() == {"augment": "mine:a"}
    assert dataclasses.replace(config, augment=()).changed() == {}
    assert hp.Config().table()["metric"] is None
    for wrong in ("", [""], 5, {"a": 1}, True):
        with pytest.raises(hp.UsageError, match="--metric"):
            hp.Config(metric=wrong)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "adm"}, "did you mean 'adam'?"),
        ({"optimizer": "torch:NAdam"}, "--optimizer torch:NAdam needs --lr"),
        ({"optimizer": "mine:f"}, "--optimizer mine:f needs --lr"),
        ({"optimizer": "torch:Nadam", "lr": 0.1}, "did you mean 'NAdam'?"),
        ({"metric": ["mine:f", "torchmetrics:Xyz"]}, "hpctrain knows no Xyz of torchmetrics"),
    ],
)
def test_settings_are_checked_before_anything_is_imported(in_empty_folder, settings, said):
    with pytest.raises(hp.UsageError) as caught:
        hp.train(**settings)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_table_is_as_it_is_written_and_names_each_part_once():
    table = parts.read_table()
    assert parts.TABLE.read_text() == to_toml(table)
    for (setting, library), names in table.items():
        assert not names.accepted.keys() & names.refused.keys()
        assert bool(names.accepted) != ((setting, library) in parts.REGISTRIES)
        assert all(names.refused.values())
        assert setting == "metric" or not any(names.accepted.values())
        assert {*names.accepted.values()} <= {"", "min", "max"}
    for setting, text in parts.EXAMPLES.items():
        part = find_part(setting, text)
        assert part.package == "torch" or part.package in parts.EXTRAS
        assert parts.is_part(setting, text)
    assert parts.MODULES.keys() == parts.EXAMPLES.keys()
    assert find_part("metric", "torchmetrics:MulticlassAUROC").direction == "max"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("setting", parts.MODULES)
def test_the_table_is_as_its_judge_says(setting):
    """All classes of the installed libraries are tried anew."""
    ended = run([sys.executable, "-m", "scripts.parts", setting], timeout=1750)
    assert ended.returncode == 0, ended.stdout + ended.stderr
