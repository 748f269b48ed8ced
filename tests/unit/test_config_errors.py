"""A table of invalid configurations with their error messages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from config_workspace import write_model, write_workspace
from datasets import Dataset

from megatron_rl.check import packages
from megatron_rl.check.configuration import CheckReport, check_config
from megatron_rl.config.checkpoint_meta import model_identity, optimizer_kind, write_meta
from megatron_rl.config.load import load
from megatron_rl.config.source import read_tree
from megatron_rl.contained import process
from megatron_rl.errors import UserError
from megatron_rl.shapes.layout import ParallelLayout
from megatron_rl.shapes.lora import format_adapters
from megatron_rl.shapes.pretrained import read_pretrained

pytestmark = pytest.mark.usefixtures("functions_load_once")


@dataclass(frozen=True)
class Bad:
    """Overrides of the valid configuration, and the content of the resulting error."""

    overrides: tuple[str, ...]
    message: str
    fix: str
    where: str = ""
    world: int | None = None
    others: bool = False  # whether further errors follow from the same mistake


TABLE = [
    Bad(tuple(row.pop("set")), **row)
    for rows in yaml.safe_load((Path(__file__).parent / "bad_configurations.yaml").read_text()).values()
    for row in rows
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    write_workspace(root)
    messages = {"prompt": [{"role": "user", "content": "a"}], "truth": "b"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([messages]), root / "chat.parquet")
    Dataset.from_list([messages]).save_to_disk(str(root / "chat"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([messages])[:0], root / "no_rows.parquet")
    return root


@pytest.fixture(autouse=True)
def inside(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


def check(*overrides: str, world: int | None = None, **options: bool) -> CheckReport:
    return check_config(load("config.yaml", overrides), world, **options)


def test_the_good_configuration_has_no_findings() -> None:
    report = check()
    assert (report.errors, report.warnings) == ((), ())


@pytest.mark.parametrize(
    "case", TABLE, ids=lambda case: " ".join(case.overrides)[:60] or f"world {case.world}"
)
def test_bad_configuration(case: Bad) -> None:
    errors = check(*case.overrides, world=case.world).errors
    found = [error for error in errors if case.message in error.message]
    assert len(found) == 1, "\n".join(str(error) for error in errors)
    assert case.others or len(errors) == 1, "\n".join(str(error) for error in errors)
    error = found[0]
    parts = (error.where, error.expected, error.got, error.fix)
    assert all(parts), f"every error has where, expected, got and fix: {error}"
    assert case.fix in (error.fix or ""), error.fix
    assert case.where in error.where


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 60


def test_all_errors_come_at_once() -> None:
    mistakes = (
        "rollout.n=8",
        "steps=many",
        "model.dtype=float16",
        "actor.layout.ranks=[9]",
        "data.train=gone.jsonl",
    )
    messages = [error.message for error in check(*mistakes, "reward.function=x").errors]
    assert len(messages) == 6


@pytest.mark.parametrize(
    "where", ["run_dir", "data.train", "evaluation.sets.a.data", "model.path", "checkpoint.resume"]
)
def test_a_path_longer_than_the_system_takes(where: str) -> None:
    (error,) = check(f"{where}={'r' * 5000}").errors
    assert error.where.startswith(where) and f"`{where}` is out of range" in str(error)
    assert "(5,000 characters)" in str(error) and len(str(error)) < 600


def test_stated_attention_that_is_not_installed() -> None:
    stated = "model.attention=transformer_engine"
    (error,) = check(stated, training=True).errors
    assert "Transformer Engine is not installed" in str(error) and "model.attention=torch" in str(error)
    planned = check(stated)  # a run for other machines
    assert not planned.errors and "not installed on this machine" in str(planned.warnings[0])


def test_half_of_transformer_engine_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transformer_engine/pytorch").mkdir(parents=True)
    (tmp_path / "transformer_engine/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert check().config.model.attention == "torch"
    (tmp_path / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()
    assert check().config.model.attention == "transformer_engine"


def test_an_error_names_where_its_value_was_written() -> None:
    assert check("steps=0").errors[0].where == "steps (override steps=0)"
    Path("stated.yaml").write_text(Path("config.yaml").read_text().replace("tensor: 2", "tensor: 0", 1))
    error = check_config(load("stated.yaml")).errors[0]
    assert error.where == "actor.layout.tensor (stated.yaml:18)"


def test_missing_required_values_are_all_named() -> None:
    Path("nothing.yaml").write_text("")
    errors = load("nothing.yaml").errors
    named = {error.where for error in errors}
    assert named == {"model.path", "data.train", "run_dir", "steps"}
    assert "no reward is configured" in [error.message for error in check("reward.function=null").errors]


def bomb(twice: str) -> str:
    """Return text whose last value would be 2^40 long; ``twice`` refers to the value before."""
    return "a0: &a0 1\n" + "".join(f"a{n + 1}: &a{n + 1} {twice.format(n)}\n" for n in range(40))


def chain(levels: int) -> str:
    """Return text with one level of nesting per line, whose last value has all of them."""
    return "a0: &a0 1\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}]\n" for n in range(levels))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- a\n- b\n", "a configuration is a mapping"),
        ("steps: 1\nsteps: 2\n", "`steps` is written twice in one section"),
        ("? [a, b]\n: 1\n", "text before the colon"),
        ("\tsteps: 1\n", "not valid YAML"),
        ("a: &x [*x]\n", "an *alias inside its own &anchor"),
        (bomb("{{b: *a{0}, c: *a{0}}}"), "more than 100,000"),
        (bomb("[*a{0}, *a{0}]"), "more than 100,000"),
        (chain(100), "more than 64"),
        ("# " + "x" * 300_000, "at most 262,144 characters"),
        ("a: " + "[" * 50_000, "at most 64 sections"),
        ("a: " + "{b: " * 5000 + "}" * 5000, "at most 64 sections"),
        ("a: " + "- " * 5000, "not valid YAML"),
        ("a:\n  " + "- " * 5000, "at most 64 sections"),
        ("reward: {arguments: {n: 9223372036854775808}}", "an integer from -2**63 to 2**63 - 1"),
        (f"steps: {'9' * 5000}", "Exceeds the limit"),
        (f"steps: 0x{'f' * 60}", "an integer from -2**63 to 2**63 - 1"),
        ("a: !!int many\n", "not valid YAML"),
    ],
)  # fmt: skip
def test_broken_yaml(text: str, message: str) -> None:
    Path("broken.yaml").write_text(text)
    errors = load("broken.yaml").errors
    assert any(message in str(error) for error in errors)
    assert all(error.expected and error.got and error.fix for error in errors)
    assert all(
        "broken.yaml" in (error.where or "") for error in errors if error.where and "yaml" in error.where
    )


def test_the_border_refuses_large_overrides_too() -> None:
    deep = "rollout.vllm." + ".".join("a" * 70) + "=1"
    (error,) = load("config.yaml", [deep]).errors
    assert "not of the form key=value" in error.message
    for override in ("steps=9" + "0" * 19, "rollout.vllm=" + "[" * 70 + "]" * 70):
        (error,) = load("config.yaml", [override]).errors
        assert "a value that no setting can have" in error.message
        assert error.where is not None and error.where.startswith("override ")
        assert error.expected and error.got and error.fix


def test_the_largest_integer_of_64_bits_is_valid() -> None:
    largest = load("config.yaml", ["reward.arguments.n=9223372036854775807"]).valid()
    assert largest.reward.arguments["n"] == 2**63 - 1


def test_a_name_that_overrides_a_merged_one_is_valid() -> None:
    arguments = "reward: {function: 'file.py:f', arguments: {first: &a {n: 1, m: 2}, second: {<<: *a, n: 3}}}"
    Path("merged.yaml").write_text(f"base: config.yaml\n{arguments}\n")
    config = load("merged.yaml").valid()
    assert config.reward.arguments == {"first": {"n": 1, "m": 2}, "second": {"n": 3, "m": 2}}


def test_a_section_may_merge_two_others_of_which_the_first_wins() -> None:
    text = "a: &a {n: 1}\nb: &b {<<: *a, m: 2}\nc: &c {n: 5, k: 6}\nd: {<<: [*b, *c], m: 4}\ne: *b\n"
    errors: list[UserError] = []
    tree = read_tree(text, "run.yaml", errors).plain()
    assert not errors
    assert tree["d"] == {"n": 1, "k": 6, "m": 4} and tree["e"] == {"n": 1, "m": 2}


def test_a_name_twice_beside_a_merge_is_an_error() -> None:
    errors: list[UserError] = []
    read_tree("a: &a {n: 1}\nb:\n  <<: *a\n  n: 2\n  n: 3\n", "run.yaml", errors)
    (error,) = errors
    assert error.message == "`n` is written twice in one section"
    assert (error.where, error.got) == ("run.yaml:5", "also at run.yaml:4")


@pytest.mark.parametrize("path", ["gone.yaml", "folder", "gone/config.yaml", "model/model.safetensors"])
def test_unreadable_files(path: str) -> None:
    errors = load(path).errors
    assert errors and all(isinstance(error, UserError) for error in errors)


WARNINGS = [
    (("batch.samples_per_prompt=1",), "compares samples of one prompt"),
    (("batch.optimizer_steps=3",), "optimizer steps get different numbers of prompts"),
    (("actor.optimizer.decay=cosine",), "final value is its initial value"),
    (("evaluation.sets={}",), "nothing is evaluated"),
    (("evaluation.sets.held_out.samples=4",), "greedy evaluation gives the same answer"),
    (("batch.prompts_per_step=64",), "a step takes more prompts than the training data has"),
    (("actor.layout.ranks=0-3", "rollout.ranks=0-3", "world_size=5"), "1 of 5 ranks have no role"),
    (("gpus_per_node=1",), "spans nodes"),
    (("gpu=h1000",), "has no constants for the GPU"),
    (("data.tools_field=tools",), "first record of data.train has no tools"),
    (("reference={}",), "the algorithm does not use it"),
    (("actor.optimizer.warmup_steps=11",), "still warming up when the run ends"),
    (("actor.optimizer.learning_rate=0.01",), "high for reinforcement learning"),
    (("rank_timeout=9",), "reward.timeout allows a wait that ends the job"),
    (("reward.http={url: http://127.0.0.1:9, timeout: 900}",), "reward.http.timeout allows a wait"),
    (("reward.http={url: http://127.0.0.1:9, rate: 0.001}",), "reward.http.rate allows a wait"),
    (("world_size=null",), "4 is the smallest that fits"),
    (("batch.prompts_per_step=1", "batch.samples_per_prompt=2", "actor.layout={}"), "have no row in a mini"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), WARNINGS, ids=lambda value: str(value)[:50])
def test_warnings(overrides: tuple[str, ...], message: str) -> None:
    report = check(*overrides)
    assert not report.errors
    assert any(message in warning.message for warning in report.warnings), report.warnings


def test_material_that_a_command_makes() -> None:
    overrides = ("data.train=made/train.jsonl", "prepare={made: make it}")
    waiting = check(*overrides)
    assert not waiting.errors and waiting.files_missing
    assert waiting.warnings[0].fix == "run: make it"
    assert "made does not exist yet" in check(*overrides, training=True).errors[0].message


def test_a_file_missing_beside_made_material_is_an_error() -> None:
    error = check("data.train=folder/train.jsonl", "prepare={folder: make it}").errors[0]
    assert error.fix == "make it with: make it"


def test_without_files_only_warns() -> None:
    report = check("model.path=gone", "data.train=gone.jsonl", without_files=True)
    assert not report.errors and len(report.warnings) == 2


def test_a_checkpoint_of_another_model_is_an_error() -> None:
    folder = Path("checkpoint")
    folder.mkdir()
    write_model(Path("other"), hidden_size=64)
    write_meta(folder, {"model": model_identity(read_pretrained(Path("other/config.json")))})
    (error,) = check("checkpoint.resume=checkpoint").errors
    assert error.message == "the checkpoint was saved for another model"
    assert error.expected == "hidden = 128, head_dim = 32" and error.got == "hidden = 64, head_dim = 16"


def test_a_run_that_has_taken_more_steps_than_it_is_to_take_is_an_error() -> None:
    for step in (8, 12):
        folder = Path(f"run/checkpoints/step_{step}")
        folder.mkdir(parents=True)
        write_meta(folder, {"model": {}, "step": step})
    (error,) = check().errors
    assert (
        "beyond the last step" in error.message
        and error.expected.startswith("12 or more")
        and error.got == "10"
    )
    assert not check("steps=12").errors and not check("checkpoint.resume=run/checkpoints/step_8").errors


LORA = ("actor.lora.rank=4", "actor.lora.targets=[linear_qkv]")


@pytest.mark.parametrize(
    ("overrides", "differs", "expected"),
    [
        (LORA, None, ""),
        (("actor.lora.rank=8", LORA[1]), "other adapters", "rank 8, alpha 8 on linear_qkv"),
        ((*LORA, "actor.lora.alpha=2.5"), "other adapters", "rank 4, alpha 2.5 on linear_qkv"),
        (LORA[:1], "other adapters", "rank 4, alpha 4 on linear_qkv, linear_proj, linear_fc1, linear_fc2"),
        ((), "other adapters", "none"),
        (
            ("actor.lora.rank=4", "actor.lora.targets=[linear_fc1,linear_qkv]"),
            "other adapters",
            "rank 4, alpha 4 on linear_qkv, linear_fc1",
        ),
        ((*LORA, "actor.optimizer.distributed=false"), "another optimizer", "replicated"),
        ((*LORA, "model.dtype=bfloat16"), "another dtype", "bfloat16"),
    ],
)
def test_a_checkpoint_of_a_learner_that_is_built_otherwise_is_an_error(
    overrides: tuple[str, ...], differs: str | None, expected: str
) -> None:
    adapters = format_adapters(4, 4.0, ["linear_qkv"])
    saved = {"optimizer": optimizer_kind("adam", True), "dtype": "float32", "adapters": adapters}
    layout = {"world_size": 4, **asdict(ParallelLayout(ranks=tuple(range(4))))}
    folder = Path("of_learners")
    folder.mkdir(exist_ok=True)
    write_meta(folder, {"model": {}, "step": 8, "roles": {"actor": {**saved, "layout": layout}}})
    errors = check(f"checkpoint.resume={folder}", *overrides).errors
    if differs is None:
        assert not errors
        return
    (error,) = errors
    assert differs in error.message and error.expected == expected, error
    assert error.where == "of_learners (actor)" and error.fix


def test_adapters_of_a_reward_model_that_learns_from_the_start_are_compared_too() -> None:
    """Its model and its layers with adapters are not stated; both are the actor's."""
    layers = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    saved = {"optimizer": optimizer_kind("adam", True), "dtype": "float32"}
    layout = {"world_size": 4, **asdict(ParallelLayout(ranks=tuple(range(4))))}
    role = {**saved, "layout": layout, "adapters": format_adapters(4, 4.0, layers)}
    folder = Path("judged/stages/reward_judge/checkpoints/step_2")
    folder.mkdir(parents=True)
    write_meta(folder, {"model": {}, "step": 2, "roles": {"reward.models.judge": role}})
    judge = "reward.models={judge: {lora: {rank: RANK}, training: {data: pairs.jsonl, steps: 4}}}"
    for rank in ("4", "8"):
        errors = check(judge.replace("RANK", rank), "run_dir=judged").errors
        expected = [error.expected for error in errors if error.message.startswith("the checkpoint")]
        assert expected == ([] if rank == "4" else [format_adapters(8, 8.0, layers)]), errors


def test_a_checkpoint_without_the_critic_that_the_algorithm_needs_is_an_error() -> None:
    folder = Path("of_an_actor")
    folder.mkdir()
    write_meta(folder, {"model": {}, "step": 8, "roles": {"actor": {}}})
    (error,) = check(f"checkpoint.resume={folder}", "algorithm.name=ppo").errors
    assert error.message == "the checkpoint has no critic" and error.got == "actor"


@pytest.mark.slow
def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    present = packages.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "swanlab" else present(name))
    asked, anew = "logging.trackers=[swanlab]", "checkpoint.resume=never"
    (error,) = check(asked, anew, training=True).errors
    assert error.where.startswith("logging.trackers (override") and error.fix is not None
    assert "swanlab is not installed" in error.message and "pip install megatron_rl[swanlab]" in error.fix
    planned = check(asked, anew)  # a run for other machines
    assert not planned.errors and error.message in [warning.message for warning in planned.warnings]
    lacking = "reasoning_gym"
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == lacking else present(name))
    asked = "rollout.environment.name=megatron_rl.environments.reasoning_gym:ReasoningGym"
    (error,) = check(asked, anew, training=True).errors
    assert error.fix is not None and "pip install megatron_rl[reasoning-gym]" in error.fix
    monkeypatch.setattr(packages, "find_spec", present)
    for grader in ("math_answer:marked_number", "reasoning_gym:score"):
        assert not check(f"reward.function=megatron_rl.rewards.{grader}", anew, training=True).errors
    assert not check(asked, anew, training=True).errors


LOADS = {
    "import no_such_module_at_all\ndef score(response): return 1.0\n": "No module named",
    "import os\nos._exit(0)\ndef score(response): return 1.0\n": "ended with status 0 while loading",
    "raise SystemExit(0)\ndef score(response): return 1.0\n": "SystemExit",
    "import functools\nscore = functools.partial(lambda answer: 1.0)\n": "requires answer",
}  # fmt: skip
KEYS = ("reward.function", "evaluation.sets.held_out.reward", "evaluation.sets.held_out.evaluators.style")


@pytest.mark.parametrize(("source", "words"), LOADS.items())
@pytest.mark.parametrize("key", KEYS)
def test_functions_are_loaded_as_a_run_loads_them(tmp_path: Path, key: str, source: str, words: str) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(source)
    # A checkpoint that another test has left in the workspace is none of this one.
    report = check(f"{key}={file}:score", "checkpoint.resume=never")
    (error,) = report.errors
    assert (error.where or "").startswith(key)
    assert words in str(report.errors[0])


PIECES = ("algorithm.policy_loss", "rollout.engine", "model.provider", "evaluation.sets.held_out.reward")


@pytest.mark.parametrize("key", PIECES)
def test_a_piece_that_ends_its_process_does_not_end_the_check(tmp_path: Path, key: str) -> None:
    file = tmp_path / "piece.py"
    file.write_text("import os\nos._exit(0)\ndef own(*_, **__): return 1.0\n")
    found = [error for error in check(f"{key}={file}:own").errors if (error.where or "").startswith(key)]
    assert len(found) == 1 and "ended with status 0 while loading" in str(found[0])


@pytest.mark.slow
def test_a_piece_that_never_ends_its_import_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for the functions beside it, on a busy machine too.
    monkeypatch.setattr(process, "LOAD_SECONDS", 4.0)
    file = tmp_path / "piece.py"
    file.write_text("while True:\n    pass\ndef own(*_, **__): return 1.0\n")
    for key in ("algorithm.policy_loss", "reward.function"):
        found = [str(error) for error in check(f"{key}={file}:own", "checkpoint.resume=never").errors]
        assert len(found) == 1 and "still loading after 4 s" in found[0]


def test_an_import_that_fails_is_said_of_a_provider_of_models(tmp_path: Path) -> None:
    file = tmp_path / "piece.py"
    file.write_text("import no_such_module_at_all\ndef own(*_, **__): return 1.0\n")
    found = [str(error) for error in check(f"model.provider={file}:own").errors]
    assert any("No module named 'no_such_module_at_all'" in text for text in found), found
