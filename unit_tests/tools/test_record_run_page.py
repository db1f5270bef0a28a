"""The recording of the run page: a run folder as it was after some steps, and a GIF of pictures."""

import json

from PIL import Image

from analysis.report.run_files import read_run
from tools.record_run_page import cut_run, write_gif


def test_a_cut_run_is_as_it_was_and_has_not_ended(tmp_path):
    run = tmp_path / "made" / "quickstart-1"
    run.mkdir(parents=True)
    lines = [{"step": 0, "eval/reward/mean": 0.4}, *({"step": n, "reward/mean": n / 10} for n in range(5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "config.yaml").write_text("name: quickstart\n")
    (run / "summary.json").write_text("{}")
    for end in (3, 2):
        cut = read_run(cut_run(run, end, tmp_path / "cut"))
        assert [line["step"] for line in cut.metrics] == [*range(end + 1)] and cut.evaluations.keys() == {0}
        assert cut.name == "quickstart-1" and not cut.has_ended


def test_a_gif_has_every_picture_for_its_time(tmp_path):
    pictures = [Image.new("RGB", (8, 4), colour) for colour in ("white", "red", "blue")]
    out = tmp_path / "page.gif"
    assert write_gif([(picture, 100 * n) for n, picture in enumerate(pictures, 1)], out) == out.stat().st_size
    with Image.open(out) as image:
        shown = []
        for n in range(image.n_frames):
            image.seek(n)
            shown.append((image.convert("RGB").getpixel((3, 2)), image.info["duration"]))
    assert shown == [((255, 255, 255), 100), ((255, 0, 0), 200), ((0, 0, 255), 300)]
