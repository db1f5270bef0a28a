"""The script of docs/coming_from/trl.md runs in TRL's environment, on the rows and with the settings that it names."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.benchmarks.beside_trl import trl_environment

PAGE = Path(__file__).parent.parent.parent / "docs" / "coming_from" / "trl.md"
TOLD = """
args = trainer.args
print("updates:", trainer.state.global_step, "of", args.generation_batch_size // args.num_generations, "prompts")
print("loss:", args.loss_type, args.scale_rewards, args.epsilon, args.epsilon_high, args.beta)
print("correction:", args.vllm_mode, args.vllm_importance_sampling_mode, args.vllm_importance_sampling_clip_max)
print("rewards:", sorted(k for k in trainer.state.log_history[0] if re.fullmatch("rewards/.*/mean", k)))
"""


@pytest.mark.verify
@pytest.mark.timeout(1800)
def test_the_script_of_the_page_trains_in_trl(tiny_path: str, tmp_path: Path) -> None:
    """With a tiny model, the page's rows, two updates and short replies that transformers generates."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    [rows], [script] = ([block for block in blocks if name in block] for name in ("json.dumps", "GRPOTrainer("))
    for old, new in {
        '"Qwen/Qwen2-0.5B-Instruct"': repr(tiny_path),
        'load_dataset("trl-lib/DeepMath-103K", split="train")': (
            'load_dataset("json", data_files="deepmath.jsonl", split="train")'
        ),
        "max_steps=200": "max_steps=2, logging_steps=1, use_cpu=True, report_to='none'",
        "max_completion_length=512": "max_completion_length=4",
        "use_vllm=True": "use_vllm=False",
    }.items():
        assert script.count(old) == 1, f"the page has no {old}"
        script = script.replace(old, new)
    (tmp_path / "script.py").write_text(f"import re\n{rows}\n{script}\n{TOLD}")
    python = trl_environment()
    done = subprocess.run([python, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    # the defaults that the page's recipe writes out
    assert done.stdout.splitlines()[-4:] == [
        "updates: 2 of 4 prompts",
        "loss: dapo group 0.2 None 0.0",
        "correction: colocate sequence_mask 3.0",
        "rewards: ['rewards/accuracy_reward/mean', 'rewards/brief/mean']",
    ]
