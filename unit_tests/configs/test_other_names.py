"""Words of other frameworks, misplaced keys and values of whole sections: the error names our key."""

import re
from pathlib import Path

import pytest

from algs import find_algorithm, list_algorithms
from configs.load import list_keys
from configs.other_names import NOT_HERE, OTHER_NAMES, OTHER_VALUES, describe_other_name
from configs.schema import RLConfig, SLConfig
from core.errors import UserError
from driver.load_recipe import load_recipe

ROOT = Path(__file__).parent.parent.parent
WORDS = {
    "num_generations=8": "num_generations of TRL is group_size here",
    "actor_rollout_ref.rollout.n=8": "n of verl is group_size here",
    "rollout.n_samples_per_prompt=8": "n_samples_per_prompt of OpenRLHF is group_size here",
    "trainer.optim.lr=1e-6": "lr of verl is trainer.lr here",
    "lora.rank=8": "rank of OpenRLHF is model.lora.r here",
    "model.lora.rank=8": "rank of OpenRLHF is model.lora.r here",
    "rollout.name=vllm": "name of verl is rollout.engine here (vllm or hf)",
    "alg.beta=0.1": "beta of TRL is alg.kl.coef here",
    "top_p=0.9": "top_p of TRL and verl and OpenRLHF is rollout.top_p here",
    "rollout.typical_p=0.9": "there is no typical_p here: the trainer's distribution must be the engine's",
    "trainer.temperature=0.7": "temperature of TRL and verl and OpenRLHF is rollout.temperature here",
    # values
    "alg.loss_norm=dapo": "dapo of TRL is token here",
    "alg.loss_norm=seq-mean-token-sum-norm": "seq-mean-token-sum-norm of verl is constant here",
    "alg.kl.estimator=low_var_kl": "low_var_kl of verl is k3 here",
    "alg.name=gae": "alg.name: gae of verl is ppo here",
    "trainer.strategy=fsdp": "fsdp of verl is fsdp2 here",
    "alg.name=gpro": "(did you mean 'grpo'?)",
    "alg.kl=0.1": "alg.kl is a section, did you mean alg.kl.coef=0.1?",
    "alg.correction=none": "alg.correction is a section, did you mean alg.correction.level=none?",
    "alg=grpo": "alg is a section, set alg.name",
    "model=models/tiny": "model is a section, did you mean model.path=models/tiny?",
    "data=a.jsonl": "data is a section, did you mean data.train=a.jsonl?",
    "model.lora=16": "model.lora is a section, did you mean model.lora.r=16?",
    "tracking=wandb": "tracking is a section with the keys group, tags",
    # Ours, at another place.
    "lr=1e-5": "did you mean trainer.lr?",
    "trainer.steps=5": "did you mean steps or ",
    # Of an earlier version.
    "trainer.vision=frozen": "it is now trainer.freeze, a list: trainer.freeze=[vision]",
    # A misspelling of ours stays one, whatever others call things.
    "rollout.temprature=1": "did you mean 'temperature'?",
}


def test_a_word_of_another_framework_gets_ours():
    for override, said in WORDS.items():
        with pytest.raises(UserError) as error:
            load_recipe(RLConfig, str(ROOT / "configs" / "tiny.yaml"), [override])
        assert said in str(error.value), f"{override}: {error.value}"


def test_every_key_of_ours_in_the_table_exists():
    known = {*list_keys(RLConfig), *list_keys(SLConfig), "alg.name"}
    for name in list_algorithms():
        cls = find_algorithm({"name": name})[1]
        known |= {f"alg.{key}" for key in list_keys(cls)}
    for row in OTHER_NAMES:
        keys = re.sub(r": \w+", "", row.ours).split(" and ")
        assert {*keys} <= known, row
        # A name that is known here would never reach the table.
        assert not {name for _, name in row.list_names()} & ({*RLConfig.model_fields} - {"name"}), row


VALUES = {
    "alg.loss_norm": "dapo bnpo grpo luspo dr_grpo token-mean seq-mean-token-mean seq-mean-token-sum "
    "seq-mean-token-sum-norm",
    "alg.kl.estimator": "kl mse low_var_kl k3+",
    "alg.name": "gae reinforce_plus_plus reinforce reinforce_baseline group_norm dr_grpo dapo",
    "trainer.strategy": "fsdp",
}
"""Values of TRL, verl and OpenRLHF that have another name here."""


def test_every_value_in_the_table_is_refused_and_ours_is_taken():
    assert {key: {*values} for key, values in OTHER_VALUES.items()} == {k: {*v.split()} for k, v in VALUES.items()}
    tiny = str(ROOT / "configs" / "tiny.yaml")
    for key, values in OTHER_VALUES.items():
        for other, (_, ours) in values.items():
            with pytest.raises(UserError, match=re.escape(f"{other} of ")):
                load_recipe(RLConfig, tiny, [f"{key}={other}"])
            ours = ours.removeprefix("nearest to ").partition(",")[0]
            needed = ["alg.kl.coef=0.1"] * (key == "alg.kl.estimator") + ["alg.kl.place=reward"] * (ours == "k1")
            load_recipe(RLConfig, tiny, [f"{key}={ours}", *needed])


@pytest.mark.parametrize("framework", ["TRL", "verl", "OpenRLHF"])
def test_every_name_of_the_page_is_known_to_the_program(framework):
    """Names of the first column, with their sections; values and rows on data formats have none."""
    page = (ROOT / "docs" / "coming_from" / f"{framework.lower()}.md").read_text()
    rows = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    for row in rows:
        # Names stand before the parentheses with their defaults, and `_mode` continues the name before it.
        bare = re.sub(r"\([^)]*\)", "", row)
        for name in re.findall(r"`(?:--)?([A-Za-z][\w.]*)`", bare):
            if name in ("train_dpo", "train_sft", "KTOTrainer"):
                continue
            said = describe_other_name(name, is_certain=True) or describe_other_name(name)
            assert framework in said or name.rpartition(".")[2] in NOT_HERE, f"{name}: {said!r}"
