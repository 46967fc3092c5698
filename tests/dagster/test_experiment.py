from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from contracts.yaml_text import load_yaml
from resources.base_config import SftBase
from resources.errors import ExperimentError
from resources.experiment import find_experiments, load_experiment, parse_experiment
from trainer.algorithms.dapo import Dapo
from triplane_dagster.dry_run import plan_of

FOLDER = Path(__file__).parents[2] / "experiments"
QUICKSTART = FOLDER / "quickstart.yaml"


@pytest.mark.parametrize("path", find_experiments(FOLDER), ids=lambda path: path.stem)
def test_shipped_experiments_load_and_pass_a_dry_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path))
    experiment = load_experiment(path)
    assert experiment.name == path.stem.replace("-", "_")
    rows = plan_of(experiment)
    assert [row.step for row in rows][:3] == ["task_suite", "base_policy", "iteration_inputs"]
    assert {row.state for row in rows} == {"will run"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.learning_rat=1e-4", "trainer.learning_rat is not a field: did you mean learning_rate?"),
        ("base.sft.max_step=3", "base.sft.max_step is not a field: did you mean max_steps?"),
        ("engine.thread=3", "engine.thread is not a field: did you mean threads?"),
        ("engine={kind: vllm, tolerance: -1}", "engine.tolerance = -1: Input should be greater than 0"),
        ("engine={kind: vllm, tolerence: 1}", "engine.tolerence is not a field: did you mean tolerance?"),
        (
            "engine={kind: openai, base_url: http://h/v1, events_port: 5}",
            "engine.events_port has no effect on one server",
        ),
        ("engine={kind: vllm, base_url: http://h:1, events_port: 5}", "engine.events_port has no effect on one server"),
        ("engine={kind: vllm, events_port: 5}", "events_port needs base_url"),
        ("trainer={lora: {}, precision: {kind: bf16}}", "trainer.lora merges adapters in float32"),
        ("evaluation.engine={threads: 0}", "evaluation.engine.threads = 0: Input should be greater"),
        (
            "evaluation={engine: {kind: openai, base_url: http://h/v1, events_port: 5}}",
            "evaluation.engine.events_port has no effect on one server",
        ),
        ("engine={kind: vllm, threads: 1}", "engine.threads is not a field: only another kind has this field"),
        ("rollouts.group_size=0", "rollouts.group_size = 0: Input should be greater than or equal to 1"),
        ("trainer.temperature=2", "set both to the same value"),
        ("trainer.routing_replay=true", "rollouts.record_routing is false: set it to true too"),
        ("rollouts={keep: first, oversample: 2}", "keep first depends on the clock: set profile: throughput"),
        ("rollouts.keep=spread", "keep spread chooses among over-sampled episodes: set oversample"),
        ("rollouts.top_p=0", "rollouts.top_p = 0: Input should be greater than 0"),
        ("trainer.algorithm={kind: gspo, aggregation: token}", "gspo has one term for each sequence"),
        ("trainer.algorithm={kind: cispo, dual_clip: 3}", "cispo bounds the ratio of both signs"),
        ("trainer.algorithm={kind: ppo, advantage: group_mean}", "trainer.algorithm.advantage = 'group_mean': Input"),
        ("trainer.algorithm.gamma=0.9", "only another kind has this field"),
        ("trainer.corrections.veto=2", "trainer.corrections.veto = 2: Input should be less than 1"),
        ("sandboxes.limits.memory=3", "did you mean memory_mb?"),
        ("seed", "is not field=value"),
        ("name.x=2", "which has no fields"),
        ("name=Big Name", "name = 'Big Name'"),
        ("trainer.corrections.importance_cap=.inf", "trainer.corrections.importance_cap = inf: Input should be a"),
        ("trainer.max_gradient_norm=inf", "trainer.max_gradient_norm = inf: Input should be a"),
        ("trainer.algorithm.clip_high=.inf", "trainer.algorithm.clip_high = inf: Input should be a"),
        ("base.sft.max_gradient_norm=.nan", "base.sft.max_gradient_norm = nan: Input should be a"),
        ("trainer.launcher.timeout_s=.inf", "trainer.launcher.timeout_s = inf: Input should be a"),
        ("trainer.launcher.timeout_s=1e300", "trainer.launcher.timeout_s = 1e+300: Input should be less than"),
        ("sandboxes.limits.lifetime_s=.inf", "sandboxes.limits.lifetime_s = inf: Input should be a"),
        ("sandboxes.limits.cpu=1e300", "sandboxes.limits.cpu = 1e+300: Input should be less than"),
        ("engine={kind: vllm, drain_s: .inf}", "engine.drain_s = inf: Input should be a"),
        ("rewards.valid=.inf", "rewards.valid = inf: Input should be a"),
        ("schedule.max_hours=.inf", "schedule.max_hours = inf: Input should be a"),
        ("schedule.max_hours=1e11", "schedule.max_hours = 100000000000.0: Input should be less than"),
        ("trainer={beta1: 0.5, beta2: 0.5, beta1: 0.6}", "key 'beta1' is given twice"),
        ("description=2026-02-30", "is not a YAML value (day is out of range for month); quote it"),
        ("description=!!int ''", "is not a YAML value (this is no int "),
    ],
)
def test_a_bad_value_is_named_with_its_fix(override: str, said: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(QUICKSTART, [override])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_that_serves_no_adapters_is_refused_at_once() -> None:
    overrides = ["trainer={lora: {}, precision: {kind: fp32}}", "engine={kind: sglang, base_url: http://a:1}"]
    with pytest.raises(ExperimentError, match=r"set engine\.weights to dequantized"):
        load_experiment(QUICKSTART, overrides)
    load_experiment(QUICKSTART, [*overrides, "engine.weights=dequantized"])
    routed = "engine={kind: routed, replicas: [{kind: sglang, base_url: http://a:1}]}"
    with pytest.raises(ExperimentError, match="in replicas too"):
        load_experiment(QUICKSTART, [overrides[0], routed])


@pytest.mark.parametrize(
    ("engine", "returns"),
    [
        ("{kind: builtin}", True),
        ("{kind: openai, base_url: http://h/v1}", False),
        ("{kind: vllm}", False),
        ("{kind: vllm, flags: [--enable-return-routed-experts]}", True),
        ("{kind: vllm, base_url: http://h}", True),
    ],
)
def test_recording_routing_needs_an_engine_that_returns_it(engine: str, returns: bool) -> None:
    overrides = ["rollouts.record_routing=true", f"engine={engine}"]
    if returns:
        assert load_experiment(QUICKSTART, overrides).rollouts.record_routing
        return
    with pytest.raises(ExperimentError, match=r"engine\.kind .* returns no routed experts: use builtin, or vllm"):
        load_experiment(QUICKSTART, overrides)


@pytest.mark.parametrize("setting", ["rollouts.grammar=true", "rollouts.top_p=0.9"])
def test_sampling_from_part_of_the_vocabulary_needs_an_engine_that_records_it(setting: str) -> None:
    assert load_experiment(QUICKSTART, [setting]).rollouts.restrictions
    assert load_experiment(QUICKSTART, [setting, "engine={kind: sglang, base_url: http://h, weights: dequantized}"])
    engines = ["{kind: openai, base_url: http://h/v1}", "{kind: vllm}"]
    if "top_p" in setting:
        engines.append("{kind: vllm, flags: [--no-skip-tokenizer-init]}")
    else:
        assert load_experiment(QUICKSTART, [setting, "engine={kind: vllm, flags: [--no-skip-tokenizer-init]}"])
    for engine in engines:
        with pytest.raises(ExperimentError, match=r"engine\.kind \w+ gives no record to train on: use builtin"):
            load_experiment(QUICKSTART, [setting, f"engine={engine}"])


def test_overrides_are_yaml_values_of_any_depth() -> None:
    experiment = load_experiment(
        QUICKSTART, ["trainer.learning_rate=1e-4", "seed=7", "engine.threads=1", "rollouts.refill=false"]
    )
    assert experiment.trainer.learning_rate == 1e-4
    assert (experiment.seed, experiment.rollouts.refill) == (7, False)
    assert experiment.engine.model_dump()["threads"] == 1


def test_another_kind_starts_from_its_own_defaults() -> None:
    experiment = load_experiment(QUICKSTART, ["trainer.algorithm.clip_low=0.1", "trainer.algorithm.kind=dapo"])
    assert experiment.trainer.algorithm == Dapo(clip_low=0.1)
    same = load_experiment(QUICKSTART, ["trainer.algorithm.kind=grpo"])
    assert same == load_experiment(QUICKSTART)


def test_another_kind_keeps_a_section_whose_fields_do_not_depend_on_it(tmp_path: Path) -> None:
    real = QUICKSTART.parent / "qwen3-30b-a3b.yaml"
    launcher = load_experiment(real).trainer.launcher
    assert (launcher.kind, launcher.gpus, launcher.backend) == ("local", 8, "fsdp2")
    moved = launcher.model_copy(update={"kind": "kubernetes"})
    assert load_experiment(real, ["trainer.launcher.kind=kubernetes"]).trainer.launcher == moved
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {real}\nname: child\ntrainer: {{launcher: {{kind: kubernetes}}}}\n")
    assert load_experiment(child).trainer.launcher == moved


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"])
def test_every_algorithm_is_chosen_by_its_kind_alone(kind: str) -> None:
    assert load_experiment(QUICKSTART, [f"trainer.algorithm.kind={kind}"]).trainer.algorithm.kind == kind


def test_the_former_grpo_section_is_refused_with_the_new_place_of_each_key() -> None:
    override = "trainer.grpo={learning_rate: 1e-4, clip_high: 0.2, importance_cap: 2.0}"
    with pytest.raises(ExperimentError) as caught:
        load_experiment(QUICKSTART, [override])
    said = str(caught.value)
    assert "grpo.learning_rate to trainer.learning_rate" in said
    assert "grpo.clip_high to trainer.algorithm.clip_high" in said
    assert "grpo.importance_cap to trainer.corrections.importance_cap" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a",
        "name: [",
        "name: x\nname2: y",
        "name: x\ndescription: 2026-02-30",
        "name: x\ndescription: 0001-01-01T00:00:00+01:00",
        "name: x\ndescription: !!bool x",
        "name: x\ndescription: !!int ''",
        "name: x\ndescription: !!timestamp x",
        'name: x\ndescription: "\\UFFFFFFFF"',
        "name: x\nseed: " + "9" * 5000,
    ],
)
def test_a_malformed_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ExperimentError, match=r"broken\.yaml"):
        load_experiment(path)


def test_a_section_that_is_given_twice_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("name: twice\ntrainer: {beta1: 0.5}\nseed: 1\ntrainer: {beta2: 0.5}\n")
    with pytest.raises(ExperimentError, match=r"twice\.yaml .*key 'trainer' is given twice .*line 4"):
        load_experiment(path)


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match=r"nothing\.yaml can't be read"):
        load_experiment(tmp_path / "nothing.yaml")


def write(folder: Path, **files: str) -> Path:
    """Write files by the stems of their names. Returns the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def test_a_file_extends_others_section_by_section(tmp_path: Path) -> None:
    last = write(
        tmp_path,
        last="extends: middle.yaml\nname: last\ntrainer: {learning_rate: 0.5}\nengine: {kind: builtin, threads: 3}\n",
        middle="extends: first.yaml\nname: middle\nrollouts: {max_turns: 3}\nengine: {kind: vllm, flags: [a, b]}\n",
        first="name: first\nseed: 7\nrollouts: {max_turns: 9, group_size: 6}\nengine: {flags: [c], kind: vllm}\n",
    )
    found = load_experiment(last, ["trainer.beta1=0.25"])
    assert (found.name, found.seed, found.rollouts.max_turns, found.rollouts.group_size) == ("last", 7, 3, 6)
    assert (found.trainer.learning_rate, found.trainer.beta1) == (0.5, 0.25)
    assert found.engine.kind == "builtin", "another kind replaces the section, whose values were another kind's"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"one": "extends: two.yaml\n", "two": "extends: one.yaml\n"}, "leads back to one.yaml: remove one of them"),
        ({"one": "extends: one.yaml\n"}, "leads back to one.yaml"),
        ({"one": "extends: gone.yaml\n"}, "gone.yaml, which "),
        ({"one": "extends: 3\n"}, "extends = 3 is not the name of a file beside it"),
        ({"one": "extends: two.yaml\n", "two": "- 1\n"}, "two.yaml is not a mapping"),
        ({"one": "extends: two.yaml\nname: one\nsede: 1\n", "two": "name: two\n"}, "did you mean seed?"),
    ],
)
def test_what_can_not_be_extended_is_one_line(files: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(write(tmp_path, **files))
    assert said in str(caught.value) and "\n" not in str(caught.value)


EPISODES = {"kind": "episodes", "experiment": "tiny", "iterations": ["0000"]}


@pytest.mark.parametrize(
    ("base", "fault"),
    [
        ({"mixture": [EPISODES, EPISODES]}, "mixture has two sources called episodes"),
        (
            {"mixture": [EPISODES], "demonstrations": {"count": 1}},
            "demonstrations has no effect without a source of kind",
        ),
        ({"start": {"path": "x"}, "model": {"layers": 1}}, "model is the shape of a fresh model, but start names one"),
        ({"lora": {"rank": 2}}, "lora adapts the weights of an imported model: set start"),
        (
            {"start": {"path": "x"}, "lora": {"rank": 2}},
            "base.lora makes adapters, which iterations continue: set trainer.lora",
        ),
        ({"mixture": [{**EPISODES, "experiment": "taught"}]}, "base.mixture.0.experiment is taught itself"),
        ({"mixture": [{"kind": "chats", "path": "x", "weight": 0}]}, "weight"),
        ({"mixture": [{"kind": "episodes", "experiment": "tiny", "iterations": []}]}, "iterations"),
        ({"mixture": [{**EPISODES, "iterations": ["0003", "0003"]}]}, "0003 is named twice, .*: name it once"),
        ({"mixture": [{"kind": "other"}]}, "kind|tag"),
    ],
)
def test_a_mixture_that_contradicts_itself_is_refused(base: dict[str, Any], fault: str) -> None:
    with pytest.raises(ExperimentError, match=fault):
        parse_experiment({"name": "taught", "base": base})


def test_the_documented_mixture_is_one_that_experiments_have() -> None:
    page = (FOLDER.parent / "docs" / "training.md").read_text()
    (block,) = (each for each in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "mixture:" in each)
    base = parse_experiment({"name": "second", **load_yaml(block)}).base
    assert isinstance(base, SftBase) and [each.called for each in base.mixture] == ["own", "episodes"]
