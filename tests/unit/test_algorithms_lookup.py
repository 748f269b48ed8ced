"""Named algorithms, their pieces and settings, the user's own, and the errors; all of it without torch."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from config_workspace import CONFIG

from megatron_rl import algorithms
from megatron_rl.algorithms import Algorithm, FunctionLoss, PolicyLoss, get_algorithm
from megatron_rl.algorithms.advantages import Rloo, Vapo
from megatron_rl.algorithms.algorithm import ALGORITHMS, CORRECTIONS, KINDS
from megatron_rl.algorithms.correction import Correction
from megatron_rl.algorithms.kl import KlInLoss
from megatron_rl.algorithms.lookup import algorithm_of, write_pieces
from megatron_rl.algorithms.losses import Gspo, PpoClip
from megatron_rl.check.unknown_names import with_suggestions
from megatron_rl.config.load import dump, load_config, load_text, to_plain
from megatron_rl.config.other_names import RENAMED
from megatron_rl.config.sections.algorithm import AlgorithmConfig
from megatron_rl.config.setting import setting_of
from megatron_rl.errors import UserError, UserErrors

ROOT = Path(__file__).resolve().parents[2]
MY_ALGORITHM = Algorithm(
    "mine", "An algorithm of a user's own.", advantage=Rloo(), policy_loss=PpoClip(clip_high=0.3)
)
OWN_FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from megatron_rl.algorithms import Advantage, Algorithm, PolicyLoss, TokenLoss
from megatron_rl.config.setting import setting

@dataclass(frozen=True)
class Raised(PolicyLoss):
    """Raise good tokens."""
    sharpness: float = setting(1.0, "Power of the probability.", more_than=0)
    plain: int = 3
    def token_loss(self, micro, log_probs):
        return TokenLoss(-micro.advantages * (self.sharpness * log_probs).exp(), {})

OWN = Algorithm("own", "Mine.", policy_loss=Raised(sharpness=0.5))

@dataclass(frozen=True)
class Watched(Advantage):
    needs_critic = True
    def estimate(self, inputs):
        return None

@dataclass(frozen=True)
class Forgetful(PolicyLoss):
    pass

class Undecorated(PolicyLoss):
    sharpness: float = 1.0
    def token_loss(self, micro, log_probs):
        return None

@dataclass(frozen=True)
class Greedy(PolicyLoss):
    def token_loss(self, micro, log_probs, algorithm):
        return None

@dataclass(frozen=True)
class Moody(PolicyLoss):
    mood: str = "good"
    def __post_init__(self):
        if self.mood != "good":
            raise RuntimeError("not today")
    def token_loss(self, micro, log_probs):
        return None

def raised(micro, log_probs):
    return TokenLoss(-micro.advantages * log_probs.exp(), {})

def three(micro, log_probs, algorithm):
    return None

NUMBER = 3
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a file of pieces of the user's own, in the current directory."""
    (tmp_path / "my_loss.py").write_text(OWN_FILE)
    (tmp_path / "broken.py").write_text("import torch_of_another_name\n")
    (tmp_path / "script.py").write_text("import sys\n\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    return "my_loss.py"


def readme_algorithms() -> set[str]:
    paragraph = (ROOT / "README.md").read_text().split("\nAlgorithms: ")[1].split(". ")[0]
    return set(re.findall(r"`([a-z_]+)`", paragraph))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_complete(name):
    """Its settings are in bounds, it is in the README's list, and its recipe runs it."""
    algorithm = ALGORITHMS[name]
    assert algorithm.name == name
    assert algorithm.summary.endswith(".") and len(algorithm.summary) < 100
    assert list(algorithm.problems()) == []
    assert name in readme_algorithms()
    recipe = load_config(ROOT / "configs" / "recipes" / f"{name}.yaml")
    if isinstance(algorithm.advantage, Vapo):  # the recipe's answers are too short for the paper's alpha
        algorithm = dataclasses.replace(
            algorithm, advantage=dataclasses.replace(algorithm.advantage, alpha=5.0)
        )
    assert algorithm_of(recipe) == algorithm.within(recipe.rollout.max_response_tokens)


def test_the_readme_names_no_other_algorithm():
    assert readme_algorithms() == set(ALGORITHMS)


def test_keys_of_the_configuration_are_the_pieces_of_an_algorithm():
    keys = [item.name for item in dataclasses.fields(AlgorithmConfig)]
    assert keys == ["name", *KINDS] == ["name", *ALGORITHMS["grpo"].pieces()]


@pytest.mark.parametrize("key", KINDS)
def test_every_piece_says_what_it_is(key):
    kind = KINDS[key]
    assert getattr(algorithms, kind.base.__name__) is kind.base
    for name, piece in kind.named.items():
        assert isinstance(piece, kind.base) and list(piece.problems(f"algorithm.{key}")) == []
        assert type(piece).__doc__
        assert get_algorithm("grpo", {key: name}).pieces()[key] == piece
        for item in dataclasses.fields(piece):
            assert setting_of(item).meaning.endswith("."), item.name


@pytest.mark.parametrize("key", ["advantage", "policy_loss"])
def test_every_estimator_and_loss_is_used_and_names_its_source(key):
    used = {type(algorithm.pieces()[key]) for algorithm in ALGORITHMS.values()}
    assert used == {type(piece) for piece in KINDS[key].named.values()}
    assert all("Source:" in (cls.__doc__ or "") for cls in used)


def test_table_and_lookup_need_no_torch():
    code = (
        "import sys\n"
        "from megatron_rl.algorithms import ALGORITHMS, Algorithm, get_algorithm\n"
        "from megatron_rl.check.configuration import check_config\n"
        "[get_algorithm(name, {'policy_loss': {'entropy_coef': 0.1}}) for name in ALGORITHMS]\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_roles_each_algorithm_needs():
    critic = {name for name, a in ALGORITHMS.items() if a.needs_critic}
    reference = {name for name, a in ALGORITHMS.items() if a.needs_reference}
    greedy = {name for name, a in ALGORITHMS.items() if a.needs_greedy_baseline}
    alone = {name for name, a in ALGORITHMS.items() if not a.advantage.compares_samples}
    assert critic == {"ppo", "vapo"}
    assert reference == {"reinforce_pp", "reinforce_pp_baseline"}
    assert greedy == {"remax"}
    assert alone == {"ppo", "vapo", "remax", "reinforce", "reinforce_pp", "distillation"}
    assert {name for name, a in ALGORITHMS.items() if a.needs_teacher} == {"distillation"}
    assert {name for name, a in ALGORITHMS.items() if not a.needs_rewards} == {"distillation"}
    assert get_algorithm("grpo", {"kl": "loss"}).needs_reference


def test_a_name_brings_its_defaults_and_no_name_keeps_the_algorithms():
    dapo = get_algorithm("dapo", {"policy_loss": {"clip_low": 1, "dual_clip": None}}).policy_loss
    assert dapo == PpoClip(clip_low=1.0, clip_high=0.28, dual_clip=None)
    assert get_algorithm("dapo", {"policy_loss": "ppo_clip"}).policy_loss == PpoClip()
    changed = get_algorithm("grpo", {"policy_loss": {"name": "gspo", "clip_low": 1e-3}}).policy_loss
    assert changed == Gspo(clip_low=1e-3, clip_high=4e-4)
    assert get_algorithm("grpo", {"policy_loss": Gspo(clip_low=0.5)}).policy_loss == Gspo(clip_low=0.5)
    mis = get_algorithm("grpo", {"correction": {"name": "mis", "threshold": 5}}).correction
    assert mis == Correction("sequence", 5.0, rejection=dict(CORRECTIONS["mis"].rejection))
    assert not ALGORITHMS["grpo"].correction.is_active


def test_a_setting_is_laid_over_a_name_from_another_file_or_the_command_line():
    text = CONFIG + "algorithm: {name: grpo, policy_loss: gspo}\n"
    config = load_text(text, ["algorithm.policy_loss.clip_low=0.01"]).valid()
    assert algorithm_of(config).policy_loss == Gspo(clip_low=0.01)
    config = load_text(CONFIG, ["algorithm.kl=loss", "algorithm.kl.coef=0.2"]).valid()
    assert algorithm_of(config).kl == KlInLoss(coef=0.2)


def test_the_length_limit_reaches_the_pieces_that_need_it():
    algorithm = get_algorithm("dr_grpo", {"overlong": {"buffer": 0.5}}, max_response_tokens=12)
    assert (algorithm.max_response_tokens, algorithm.aggregation.scale_factor) == (12, 12)
    with pytest.raises(UserErrors, match="longer than a response may be"):
        get_algorithm("dr_grpo", {"overlong": {"buffer": 13}}, max_response_tokens=12)
    get_algorithm("dr_grpo", {"overlong": {"buffer": 13, "limit": 20}}, max_response_tokens=12)
    stated = get_algorithm("dr_grpo", {"aggregation": {"scale_factor": 3}}, max_response_tokens=12)
    assert stated.aggregation.scale_factor == 3.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_written_pieces_make_the_same_algorithm(name):
    config = load_text(CONFIG, [f"algorithm.name={name}"]).valid()
    algorithm = algorithm_of(config)
    written, reasons = write_pieces(config, algorithm)
    reloaded = load_text(dump(written)).valid()
    assert reloaded == written
    assert algorithm_of(reloaded) == algorithm
    assert write_pieces(reloaded, algorithm) == (written, {}), "explicit pieces are derived no more"
    assert reasons["algorithm.policy_loss"] == f"algorithm.name={name}"
    assert (written.algorithm.value_loss is not None) == algorithm.needs_critic


@pytest.mark.slow
def test_written_pieces_of_every_name_are_the_same_pieces():
    for key, kind in KINDS.items():
        for name, piece in kind.named.items():
            config = load_text(CONFIG, ["algorithm.name=ppo", f"algorithm.{key}={name}"]).valid()
            written, reasons = write_pieces(config, get_algorithm("ppo", {key: name}, max_response_tokens=8))
            reloaded = load_text(dump(written)).valid()
            again = get_algorithm("ppo", {key: getattr(reloaded.algorithm, key)}, max_response_tokens=8)
            # YAML has lists where the tables have tuples.
            assert to_plain(getattr(again, key)) == to_plain(piece.with_response_limit(8)), (key, name)
            assert f"algorithm.{key}" not in reasons


def test_written_pieces_of_the_user_make_the_same_algorithm(own):
    for override in (
        f"algorithm={{name: grpo, policy_loss: {{name: '{own}:Raised', sharpness: 0.3}}}}",
        f"algorithm={{name: '{own}:OWN'}}",
        f"algorithm={{name: '{own}:OWN', policy_loss: {{sharpness: 0.4}}}}",
    ):
        config = load_text(CONFIG, [override]).valid()
        algorithm = algorithm_of(config)
        written, _ = write_pieces(config, algorithm)
        reloaded = load_text(dump(written)).valid()
        assert reloaded == written and repr(algorithm_of(reloaded)) == repr(algorithm), override


def test_algorithm_of_the_user_by_module_and_name():
    algorithm = get_algorithm("test_algorithms_lookup:MY_ALGORITHM", {"advantage": {"whiten": True}})
    assert (algorithm.advantage, algorithm.policy_loss.clip_high) == (Rloo(whiten=True), 0.3)
    with pytest.raises(UserError, match="is not an Algorithm"):
        get_algorithm("test_algorithms_lookup:ROOT")


def test_pieces_of_the_user_by_file(own):
    loss = get_algorithm("grpo", {"policy_loss": {"name": f"{own}:Raised", "sharpness": 2}}).policy_loss
    assert isinstance(loss, PolicyLoss) and (loss.sharpness, loss.plain) == (2.0, 3)
    assert get_algorithm("grpo", {"policy_loss": f"{own}:Raised"}).policy_loss.sharpness == 1.0
    plain = get_algorithm("grpo", {"policy_loss": {"name": f"{own}:raised", "entropy_coef": 0.5}}).policy_loss
    assert isinstance(plain, FunctionLoss)
    assert (plain.entropy_coef, plain.function.__name__) == (0.5, "raised")
    assert get_algorithm("grpo", {"advantage": f"{own}:Watched"}).needs_critic


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        ("my_loss.py:Raisde", ["my_loss.py has no 'Raisde'", "did you mean 'Raised'?"]),
        ("my_los.py:Raised", ["the file my_los.py does not exist", "the current directory is"]),
        ("my_loss_module:Raised", ["cannot import my_loss_module", "PYTHONPATH"]),
        ("broken.py:Raised", ["cannot import broken.py", "torch_of_another_name", "correct the module"]),
        ("script.py:Raised", ["cannot import script.py", "SystemExit: 3", "correct the module"]),
        ({"name": "my_loss.py:Raised", "sharpnes": 1.0}, ["policy_loss.sharpnes", "policy_loss.sharpness"]),
        (
            {"name": "my_loss.py:Raised", "sharpness": 0},
            ["policy_loss.sharpness` is out of range"],
        ),
        ({"name": "my_loss.py:Raised", "plain": "x"}, ["policy_loss.plain", "an integer"]),
        ("my_loss.py:Forgetful", ["does not define token_loss", "token_loss(micro, log_probs)"]),
        ("my_loss.py:Undecorated", ["not a dataclass", "@dataclass(frozen=True)"]),
        ("my_loss.py:Greedy", ["does not accept the arguments", "token_loss(micro, log_probs)", "algorithm"]),
        ("my_loss.py:three", ["does not accept the arguments", "three(micro, log_probs)", "algorithm"]),
        ("my_loss.py:Watched", ["not derived from the base class", "megatron_rl.algorithms.PolicyLoss"]),
        ("my_loss.py:NUMBER", ["cannot be used here", "of type int"]),
        ({"name": "my_loss.py:Moody", "mood": "bad"}, ["RuntimeError: not today"]),
    ],
)
def test_mistakes_in_pieces_of_the_user_are_explained(own, piece, words):
    with pytest.raises(UserErrors) as caught:
        get_algorithm("grpo", {"policy_loss": piece})
    (error,) = caught.value.errors
    assert all((error.where, error.expected, error.got, error.fix))
    for word in words:
        assert word in str(error)


def test_a_function_is_no_correction(own):
    with pytest.raises(UserError, match="cannot be used here"):
        get_algorithm("grpo", {"correction": f"{own}:raised"})


def rejected(**measures) -> dict:
    return {"correction": {"rejection": measures}}


@pytest.mark.parametrize(
    ("name", "pieces", "words"),
    [
        ("grop", {}, ["unknown algorithm 'grop'", "algorithm.name", "did you mean 'grpo'?"]),
        ("none.such:thing", {}, ["cannot import none.such", "PYTHONPATH"]),
        ("grpo", {"policy_los": "gspo"}, ["unknown piece", "did you mean 'policy_loss'?"]),
        ("grpo", {"policy_loss": {"clip_hihg": 0.2}}, ["did you mean `algorithm.policy_loss.clip_high`?"]),
        ("grpo", {"policy_loss": {"clip_ratio_high": 0.2}}, ["called `algorithm.policy_loss.clip_high`"]),
        ("grpo", {"policy_loss": {"clip_high": "wide"}}, ["wrong type", "a number", "'wide' (text)"]),
        ("grpo", {"advantage": {"whiten": 1}}, ["wrong type", "true or false", "1 (integer)"]),
        ("grpo", {"overlong": {"limit": 1.5}}, ["wrong type", "an integer or null"]),
        ("grpo", {"correction": {"band": [1.0]}}, ["bad band", "[low, high]"]),
        ("gdpo", {"advantage": {"weights": {"format": "much"}}}, ["wrong type", "a section of names"]),
        ("grpo", {"advantage": 3}, ["cannot be used here", "3 (integer)"]),
        ("grpo", {"advantage": "rlooo"}, ["unknown advantage 'rlooo'", "did you mean 'rloo'?"]),
        ("grpo", {"policy_loss": "ppo_clp"}, ["unknown policy_loss", "did you mean 'ppo_clip'?"]),
        ("grpo", {"aggregation": "token_mean"}, ["unknown aggregation", "did you mean 'token-mean'?"]),
        ("grpo", {"correction": "tis"}, ["unknown correction 'tis'", "token_tis"]),
        ("grpo", {"correction": {"level": "tokens"}}, ["correction.level", "did you mean 'token'?"]),
        ("grpo", rejected(seq_max_k1=2.0), ["rejection.seq_max_k1", "one of", "seq_max_k2"]),
        ("grpo", rejected(token_k3=[0.1, 0.2]), ["bad threshold of token_k3", "a number > 0"]),
        ("grpo", rejected(token_k1=[2.0, 0.5]), ["bad threshold of token_k1", "[low, high]"]),
        ("grpo", {"policy_loss": {"dual_clip": 1.0}}, ["dual_clip` is out of range", "more than 1"]),
        ("ppo", {"advantage": {"gamma": 1.1}}, ["gamma` is out of range", "0 or more and at most 1"]),
        ("grpo", {"kl": {"controller": "adaptive"}}, ["algorithm.kl.controller"]),
        ("grpo", {"kl": {"name": "loss", "estimator": "k4"}}, ["kl.estimator` is 'k4'"]),
        ("grpo", {"kl": {"name": "loss", "coef_max": 0.5}}, ["this one is fixed", "controller: adaptive"]),
        (
            "grpo",
            {"kl": {"name": "loss", "controller": "adaptive", "coef": 0.2, "coef_max": 0.1}},
            ["starts above its ceiling", "at least coef = 0.2"],
        ),
        ("gdpo", {"kl": "reward"}, ["Gdpo does not read the reward", "write kl: loss"]),
        ("dapo", {"overlong": {"limit": 100, "buffer": 200}}, ["at most 100"]),
        ("grpo", {"correction": {"band": [2.0, 0.5]}}, ["bad band"]),
        ("grpo", {"reward_shaping": {"clip_low": 1.0, "clip_high": 0.0}}, ["clip_low is above"]),
        ("grpo", {"correction": {"bypass": True, "batch_normalize": True}}, ["bypass mode does not see"]),
        ("dapo", {"dynamic_sampling": {"max_rounds": 0}}, ["max_rounds` is out of range"]),
    ],
)  # fmt: skip
def test_mistakes_are_explained(name, pieces, words):
    with pytest.raises(UserErrors) as caught:
        get_algorithm(name, pieces)
    for error in caught.value.errors:
        assert all((error.where, error.expected, error.got, error.fix)), str(error)
    for word in words:
        assert word in str(caught.value)


def test_all_mistakes_come_at_once():
    with pytest.raises(UserErrors) as caught:
        advantage = {"gama": 1, "gamma": "x"}
        get_algorithm("ppo", {"advantage": advantage, "policy_loss": {"clip_low": -1}, "kl": "los"})
    assert len(caught.value.errors) == 4


def test_former_keys_lead_to_settings_that_exist():
    settings = {
        f"algorithm.{key}.{item.name}"
        for key, kind in KINDS.items()
        for piece in kind.named.values()
        for item in dataclasses.fields(piece)
    }
    former = {old: new for old, new in RENAMED.items() if old.startswith("algorithm.settings.")}
    assert len(former) > 50
    for old, new in former.items():
        assert new in settings or new.removeprefix("algorithm.") in KINDS, old
        loaded = load_text(CONFIG, [f"{old}=1"])
        (error,) = with_suggestions(loaded.errors, loaded.tree)
        assert error.message == f"`{old}` is called `{new}` here"
        assert (error.fix or "").startswith(f"write `{new}`")


def test_public_names_are_there():
    for name in algorithms.__all__:
        assert getattr(algorithms, name).__name__ == name if name != "ALGORITHMS" else algorithms.ALGORITHMS
    with pytest.raises(AttributeError, match="no attribute 'estimat'"):
        _ = algorithms.estimat
