"""The game of two turns: its rules, what its best policy earns, and a model that learns it."""

import asyncio
import json
from pathlib import Path

import pytest

import main_rl
import main_sl
from core.types.samples import Prompt
from data_feeds.chat.tool_parsing import ParsedReply
from data_prep import tiny_model, treasure
from rollouts.envs.treasure import Treasure

pytestmark = pytest.mark.one_core

ROOT = Path(__file__).parent.parent.parent


def play(coin: int, box: str, *moves: str) -> tuple[Treasure, list[str | None]]:
    """Return the game after these replies, and what it showed after each; None is its end."""
    env = Treasure(Prompt(id="g", messages=[{"role": "user", "content": str(coin)}], answer=box))

    async def take_turns() -> list[str | None]:
        answers = [await env.step(ParsedReply(message={"role": "assistant", "content": move})) for move in moves]
        return [answer[0]["content"] if answer else None for answer in answers]

    return env, asyncio.run(take_turns())


@pytest.mark.parametrize(
    ("moves", "shown", "earned"),
    [
        (["a"], [None], [0.9]),
        (["b", "c"], ["c", None], [-0.1, 0.8]),
        (["b", "b"], ["c", None], [-0.1, 0.0]),
        (["b", "a"], ["c", None], [-0.1, 0.0]),
        (["c"], [None], [0.0]),
        (["take it"], [None], [0.0]),
    ],
)
def test_the_rules(moves, shown, earned):
    env, answers = play(9, "c", *moves)
    assert answers == shown
    assert env.scores() == {"earned": pytest.approx(sum(earned))}
    assert env.turn_scores(0) == [{"earned": value} for value in earned]


def test_the_best_policy_is_the_best_of_all(tmp_path):
    """Of all policies that may look at the coin and at the box, by enumeration."""
    rows = treasure.make(train=4, held_out=4)["eval"]
    best = []
    for row in rows:
        coin, box = int(row.messages[0]["content"]), row.answer
        games = [["a"], ["c"], *(["b", last] for last in treasure.LETTERS)]
        best.append(max(play(coin, box, *moves)[0].scores()["earned"] for moves in games))
    assert sum(best) / len(best) == pytest.approx(treasure.average_best(rows)) == pytest.approx(0.8)


def test_rows_hold_every_game_equally_often(tmp_path, capsys):
    treasure.main(["--out", str(tmp_path), "--train", "12", "--eval", "4", "--sft", "50"])
    assert "the best policy earns 0.800 per game" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    games = [(row["messages"][0]["content"], row["answer"]) for row in rows]
    assert all(games.count(game) == 3 for game in games) and len({*games}) == 4
    taught = [json.loads(line)["messages"] for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert {len(messages) for messages in taught} == {2, 4}


def test_another_seed_gives_other_games_to_learn_from():
    first, again, other = (treasure.make(train=0, held_out=0, sft=40, seed=seed)["sft"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.verify
def test_a_tiny_model_learns_the_game_to_its_optimum(tmp_path, one_thread):
    """With credit for each turn; the held-out reward is that of the policy as it samples."""
    tiny_model.main(["--out", str(tmp_path / "model")])
    treasure.main(["--out", str(tmp_path), "--train", "60", "--eval", "60", "--sft", "2000"])
    where = [f"run_dir={tmp_path / 'runs'}", f"model.path={tmp_path / 'model'}"]
    warm = main_sl.run(
        str(ROOT / "configs/treasure_sft.yaml"),
        [*where, f"data.train={tmp_path / 'sft.jsonl'}", f"save_to={tmp_path / 'warm'}"],
    )
    where[1] = f"model.path={warm.model}"
    data = [f"data.train={tmp_path / 'train.jsonl'}", f"data.eval={tmp_path / 'eval.jsonl'}"]
    done = main_rl.run(str(ROOT / "configs/treasure.yaml"), [*where, *data])
    assert done.before["reward/mean"] < 0.6
    assert done.after["reward/mean"] > 0.8 - 0.02
