"""The processor of a model that sees, behind the tokenizer: tokens, their spans, and the tensors of images."""

import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from core.errors import RunStopped, UserError
from core.types.images import ImageRefused, read_image
from data_feeds.chat.template_append import ImagesDoNotFit
from data_feeds.chat.template_messages import to_template_messages
from data_feeds.chat.tokenizer import ChatTokenizer
from modeling.images import processor as images
from modeling.images.cache import ImageCache
from modeling.images.processor import ImageProcessor
from unit_tests.helpers import seeing
from unit_tests.helpers.image_models import QWEN, SIDE, draw, draw_image, save_idefics, save_qwen, say, to_bytes

SIZES = [(28, 28), (84, 84), (100, 30), (30, 100), (200, 120), (13, 90), (60, 59), (1, 70)]


@pytest.fixture(scope="module")
def idefics(tmp_path_factory) -> str:
    return save_idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def splitting(tmp_path_factory) -> str:
    return save_idefics(tmp_path_factory.mktemp("splitting"), splits=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> str:
    return save_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.mark.parametrize("which", ["idefics", "splitting"])
def test_ids_and_tensors_are_those_of_the_models_own_processor(which, request):
    """Several images of other sizes in one row, in several turns, as transformers' Idefics3Processor has them."""
    from transformers import AutoProcessor

    path = request.getfixturevalue(which)
    chat, theirs = ChatTokenizer(path, "chat"), AutoProcessor.from_pretrained(path)
    seen = [draw(*size, seed=i) for i, size in enumerate(SIZES)]
    messages = [
        say("system", "Look."),
        say("user", "a", seen[0], "b", *seen[1:4], "c"),
        {"role": "assistant", "content": "2 red"},
        say("user", *seen[4:]),
    ]
    text = theirs.apply_chat_template(to_template_messages(messages, ""), add_generation_prompt=True)
    found = theirs(text=text, images=[[p.open() for p in seen]], add_special_tokens=False, return_tensors="pt")
    ids = chat.render(messages)
    assert ids == found["input_ids"][0].tolist()
    assert chat.images is not None
    media = chat.images.collate(seen)
    assert media.keys() == {"pixel_values", "pixel_attention_mask"}
    for name, tensor in media.items():
        assert torch.equal(tensor, found[name]), name
    places = chat.place(ids, seen)
    assert [p.image for p in places] == seen and all(p.grid is None for p in places)
    mark = chat.hf.convert_tokens_to_ids("<fake_token_around_image>")
    assert all(ids[p.begin] == ids[p.end - 1] == mark for p in places)
    outside = [i for n, i in enumerate(ids) if not any(p.begin <= n < p.end for p in places)]
    assert not chat.images.placeholder_ids & set(outside)
    assert (places[1].end - places[1].begin) == (4 if which == "idefics" else 9 * 3 + 3 + 1 + 4)


@pytest.mark.parametrize("family", QWEN)
def test_a_image_of_qwen_is_a_run_of_pads_with_a_grid(family, tmp_path):
    chat = ChatTokenizer(save_qwen(tmp_path, family), "chat")
    processor = chat.images
    assert processor is not None and type(processor.images).__name__ == "Qwen2VLImageProcessorPil"
    assert (processor.placeholder, processor.placeholder_id) == (
        "<|image_pad|>",
        chat.hf.convert_tokens_to_ids("<|image_pad|>"),
    )
    seen = [draw(*size, seed=i) for i, size in enumerate([(60, 60), (200, 120), (20, 300)])]
    ids = chat.render([say("user", *seen, "which?")])
    places = chat.place(ids, seen)
    media = processor.collate(seen)
    grids = media["image_grid_thw"].tolist()
    assert [(1, 2 * p.grid[0], 2 * p.grid[1]) for p in places if p.grid] == [tuple(grid) for grid in grids]
    assert [p.end - p.begin for p in places] == [rows * columns // 4 for _, rows, columns in grids]
    assert len(media["pixel_values"]) == sum(rows * columns for _, rows, columns in grids)
    assert {ids[i] for p in places for i in range(p.begin, p.end)} == {processor.placeholder_id}
    with pytest.raises(ImagesDoNotFit, match="aspect ratio"):
        chat.render([say("user", draw(1, 300))])


def test_images_that_follow_one_another_without_a_mark_are_told_apart(qwen):
    """A run of pads alone does not say where one image ends and the next begins; their sizes do."""
    chat = ChatTokenizer(qwen, "chat")
    pad = chat.hf.convert_tokens_to_ids("<|image_pad|>")
    seen = [draw(60, 60), draw(120, 60), draw(60, 60, seed=1)]
    sizes = [len(chat.images.expand(p).ids) for p in seen]
    assert [(p.begin, p.end) for p in chat.place([5, *[pad] * sum(sizes), 6], seen)] == [
        (1, 1 + sizes[0]),
        (1 + sizes[0], 1 + sizes[0] + sizes[1]),
        (1 + sizes[0] + sizes[1], 1 + sum(sizes)),
    ]


def test_places_must_be_as_many_as_images(idefics):
    chat = ChatTokenizer(idefics, "chat")
    one, two = draw(), draw(seed=1)
    ids = chat.render([say("user", one, "?", two)])
    assert chat.place(ids, [two], begin=chat.place(ids, [one, two])[0].end)[0].begin > 5
    assert chat.place(chat.encode("3+4"), ()) == ()
    with pytest.raises(ImagesDoNotFit, match="only 1 images"):
        chat.place(ids, [one])
    with pytest.raises(ImagesDoNotFit, match="tokens of 2 images, and 3 images"):
        chat.place(ids, [one, two, one])
    lone = [*chat.encode("a"), chat.images.placeholder_id]
    with pytest.raises(ImagesDoNotFit, match="tokens from 1 on are not those of image 1"):
        chat.place(lone, [one])
    with pytest.raises(ImagesDoNotFit, match="token 1 stands for an image"):
        chat.place(lone, ())


def count_calls(monkeypatch, *processors: ImageProcessor) -> list[ImageProcessor]:
    """The processors, one for each image that they compute from now on."""
    calls: list[ImageProcessor] = []

    def listen(to: ImageProcessor) -> None:
        plain = to.images
        monkeypatch.setattr(to, "images", lambda **given: calls.append(to) or plain(**given))

    for processor in processors:
        listen(processor)
    return calls


def test_an_image_is_processed_once_per_process_and_the_oldest_forgotten(idefics, splitting, monkeypatch):
    engine, trainer, other = ImageProcessor(idefics), ImageProcessor(idefics), ImageProcessor(splitting)
    calls = count_calls(monkeypatch, engine, trainer, other)
    seen = [draw(seed=i) for i in range(3)]
    one = sum(t.numel() * t.element_size() for t in engine.process(seen[0]).values())
    monkeypatch.setattr(images, "CACHE", ImageCache(4 * one))
    calls.clear()
    for processor in (engine, trainer):
        for image in seen:
            processor.process(image)
    assert calls == [engine] * 3
    other.process(seen[0])
    assert calls == [engine] * 3 + [other], "its settings are others"
    monkeypatch.setattr(images, "CACHE", ImageCache(2 * one))
    calls.clear()
    for image in [*seen[:2], seen[0], seen[2], seen[0]]:
        engine.process(image)
    assert len(calls) == 3, "it was used last, so the other one went"
    engine.process(seen[1])
    assert len(calls) == 4


def test_a_copy_in_another_process_computes_the_same(splitting, monkeypatch):
    processor = ImageProcessor(splitting)
    image = draw(100, 30)
    here = processor.process(image)
    there = pickle.loads(pickle.dumps(processor))
    monkeypatch.setattr(images, "CACHE", ImageCache(0))
    again = there.process(image)
    assert there.expand(image) == processor.expand(image)
    for name, tensor in here.items():
        assert torch.equal(tensor, again[name]) and tensor is not again[name]


def test_a_processor_that_cuts_in_another_way_than_expected_stops_the_run(splitting, monkeypatch):
    processor = ImageProcessor(splitting)
    monkeypatch.setattr(processor.family, "count", lambda width, height: (1, 1))
    with pytest.raises(RunStopped, match=r"cuts 84 x 84 pixels into \(3, 3\), and \(1, 1\) was expected"):
        processor.process(draw(84, 84))


def test_zeros_are_refused_since_the_model_takes_them_for_padding(tmp_path):
    path = save_idefics(tmp_path)
    for name in ("processor_config.json", "preprocessor_config.json"):
        file = tmp_path / name
        if file.is_file():
            file.write_text(file.read_text().replace('"do_normalize": true', '"do_normalize": false'))
    black = ImageProcessor(path)
    with pytest.raises(ImageRefused, match="takes for padding"):
        black.process(read_image(to_bytes(Image.new("RGB", (SIDE, SIDE)))))


def test_tiles_of_other_sizes_are_padded_and_masked(idefics):
    family = ImageProcessor(idefics).family
    small = {"pixel_values": torch.ones(2, 3, 14, 28), "pixel_attention_mask": torch.ones(2, 14, 28, dtype=torch.long)}
    large = {"pixel_values": torch.ones(1, 3, 28, 14)}
    joined = family.collate([small, large])
    assert joined["pixel_values"].shape == (1, 3, 3, 28, 28)
    assert torch.equal(joined["pixel_values"][0, :, 0].long(), joined["pixel_attention_mask"][0])
    assert joined["pixel_attention_mask"].sum((0, 2, 3)).tolist() == [14 * 28, 14 * 28, 28 * 14]
    assert joined["pixel_values"][0, :2, :, :14].all() and joined["pixel_values"][0, 2, :, :, :14].all(), "top and left"
    alone = {"pixel_values": small["pixel_values"]}
    assert torch.equal(family.collate([alone, large])["pixel_attention_mask"], joined["pixel_attention_mask"])


def test_turns_with_images_are_cut_and_written_as_whole_conversations_are(splitting):
    chat = ChatTokenizer(splitting, "chat")
    one, two = draw(84, 60), draw(30, 30, seed=1)
    asked, reply, answer = say("user", one, "how many?"), {"role": "assistant", "content": "3"}, say("user", "and", two)
    ids = chat.render([asked, reply, answer])
    begun = [*chat.render([asked]), *chat.encode("3<|end|>")]
    assert ids == [*begun, *chat.render_turns(reply, [answer])]
    last = {"role": "assistant", "content": "2"}
    whole, mask = chat.mask_turns([asked, reply, answer, last])
    assert whole == [*ids, *chat.encode("2<|end|>")]
    assert [i for i, m in zip(whole, mask, strict=True) if m] == chat.encode("3<|end|>2<|end|>")
    for turn, learnt in ((asked, "how many?"), (answer, None)):
        _, mask = chat.mask_turns([turn, last], ("user",))
        ids = chat.mask_turns([turn, last], ("user",))[0]
        spoken = [i for i, m in zip(ids, mask, strict=True) if m]
        assert learnt is None or spoken == chat.encode(learnt)
    assert chat.bound_tokens([asked], limit=5) == len(chat.images.expand(one).ids) > 5
    assert chat.bound_tokens([asked], limit=50) is None


def test_images_may_have_as_many_tokens_as_the_limit_and_no_more(splitting):
    chat = ChatTokenizer(splitting, "chat")
    assert chat.images is not None
    seen = [draw(84, 60), draw(30, 30, seed=1)]
    size = sum(len(chat.images.expand(one).ids) for one in seen)
    for asked in ([say("user", *seen)], [say("user", seen[0]), say("user", seen[1])]):
        assert [chat.bound_tokens(asked, limit=limit) for limit in (size - 1, size)] == [size, None]


@pytest.mark.parametrize("content", ["a <image> b", "<fake_token_around_image>", "<row_1_col_2>"])
def test_a_text_that_holds_a_token_of_images_is_refused(idefics, content):
    chat = ChatTokenizer(idefics, "chat")
    with pytest.raises(ImagesDoNotFit, match=r"a text holds .* which stands for an image"):
        chat.render([say("user", draw(), content)])
    with pytest.raises(ImagesDoNotFit, match="a text holds"):
        chat.render_turns({"role": "assistant", "content": "1"}, [{"role": "user", "content": content}])
    with pytest.raises(ImagesDoNotFit, match="a tool holds"):
        chat.render([say("user", "?")], [{"type": "function", "function": {"name": "f", "description": content}}])


DROPS = {
    "no part but text": "{% for p in m.content %}{{ p.text if p.type == 'text' }}{% endfor %}",
    "the first image only": "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' if loop.first }}"
    "{% endfor %}",
    "each twice": "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image><image>' }}{% endfor %}",
    "the list itself": "{{ m.content }}",
}


@pytest.mark.parametrize("drops", DROPS)
def test_a_template_that_does_not_write_every_image_once_is_refused(idefics, drops):
    chat = ChatTokenizer(idefics, "chat")
    chat.hf.chat_template = "{% for m in messages %}" + DROPS[drops] + "{% endfor %}"
    with pytest.raises(ImagesDoNotFit, match=r"times '<image>' for 2 images: use a model or a template"):
        chat.render([say("user", draw(), "?", draw(seed=1))])


def test_a_template_that_reads_lists_alone_gets_all_text_in_lists(idefics):
    """SmolVLM's template loops over parts, and would write nothing of a content that is text."""
    chat = ChatTokenizer(idefics, "chat")
    chat.hf.chat_template = (
        "{% for m in messages %}{{ m.role | capitalize }}{{ ':' if m.content[0].type == 'image' else ': ' }}"
        "{% for p in m.content %}{{ p.text if p.type == 'text' }}{{ '<image>' if p.type == 'image' }}{% endfor %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4"}
    assert chat.render_text([system, asked], reply_next=True) == "System: Be brief.<|end|>User: 3+4<|end|>Assistant:"
    seen = say("user", draw(), "?")
    assert chat.render_text([seen], reply_next=False).startswith("User:<fake_token_around_image>")
    ids, mask = chat.mask_turns([seen, {"role": "assistant", "content": "7"}], ("user",))
    assert chat.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "?"


@pytest.mark.parametrize("file", ["chat_template.json", "chat_template.jinja"])
def test_the_template_of_the_processor_is_taken(file, tmp_path):
    path = save_idefics(tmp_path)
    template = ChatTokenizer(path, "chat").hf.chat_template
    for name in ("chat_template.jinja", "chat_template.json"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="has no chat template: add one to its processor"):
        ChatTokenizer(path, "chat")
    written = json.dumps({"chat_template": template}) if file.endswith("json") else template
    (tmp_path / file).write_text(written)
    chat = ChatTokenizer(path, "chat")
    assert chat.hf.chat_template == template
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    chat.save(tmp_path / "saved")
    again = ChatTokenizer(str(tmp_path / "saved"), "chat")
    seen = [say("user", draw(), "?")]
    assert again.render(seen) == chat.render(seen)


def test_what_is_no_whole_model_that_sees_is_refused_with_one_sentence(tmp_path, tiny_path):
    path = save_idefics(tmp_path / "a")
    text = ChatTokenizer(tiny_path, "chat")
    assert text.images is None and text.place([1, 2], ()) == ()
    for call in (lambda: text.render([say("user", draw())]), lambda: text.place([1], [draw()])):
        with pytest.raises(UserError, match="is a language model, which sees no images"):
            call()
    with pytest.raises(UserError, match=r"data\.template=plain writes no images: set data.template=chat"):
        ChatTokenizer(path, "plain").render([say("user", draw())])
    config = json.loads((tmp_path / "a" / "config.json").read_text())

    def save_config(**changes):
        (tmp_path / "a" / "config.json").write_text(json.dumps(config | changes))

    save_config(image_token_id=3)
    with pytest.raises(UserError, match=r"its images are the token 3, and its tokenizer has '<image>' as 7"):
        ImageProcessor(path)
    save_config(scale_factor=1)
    with pytest.raises(UserError, match="writes 1 tokens for a tile of 28 pixels, and its model makes 4"):
        ImageProcessor(path)
    save_config()
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / "a" / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"its image processor cannot be loaded: .* preprocessor_config.json"):
        ImageProcessor(path)


def test_a_model_whose_processor_has_other_patches_is_refused(tmp_path):
    path = save_qwen(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["spatial_merge_size"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="its processor has merge_size=2, and its model 4"):
        ChatTokenizer(path, "chat")


def test_images_of_other_modes_become_rgb_on_white():
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert read_image(to_bytes(clear)).open().getpixel((0, 0)) == (255, 255, 255)
    grey = Image.new("L", (4, 4), 100)
    assert read_image(to_bytes(grey)).open().getpixel((0, 0)) == (100, 100, 100)
    deep = Image.fromarray(np.full((4, 4), 25700, dtype=np.uint16))
    assert read_image(to_bytes(deep)).open().getpixel((0, 0)) == (100, 100, 100)
    turned = draw_image(40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: viewers show it upright
    image = read_image(to_bytes(turned, "JPEG", exif=exif))
    assert (image.width, image.height) == (20, 40) == image.open().size
    assert len(repr(image)) < 200, "its bytes are in no sentence"


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_images_of_gemma_are_those_of_its_own_processor(family, tmp_path):
    """Gemma 4's cannot be imported without torchvision; its text is one line, and its image processor counts."""
    own = ImageProcessor(seeing.save_model(tmp_path, family))
    seen = [draw(*size, seed=i) for i, size in enumerate([(28, 28), (100, 30), (30, 100), (13, 90)])]
    found = own.images(images=[p.open() for p in seen], return_tensors="pt")
    if family == "gemma3":
        from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

        for name, text in zip(("boi", "image", "eoi"), own.family.reserved, strict=True):
            setattr(own.tokenizer, f"{name}_token", text)
            setattr(own.tokenizer, f"{name}_token_id", own.tokenizer.convert_tokens_to_ids(text))
        theirs = Gemma3Processor(own.images, own.tokenizer, image_seq_length=4)
        want = [theirs.replace_image_token(found, i) for i in range(len(seen))]
    else:
        want = [f"<|image>{'<|image|>' * n}<image|>" for n in found["num_soft_tokens_per_image"].tolist()]
        assert len({*want}) > 1
    assert [own.expand(image).text for image in seen] == want
    for name, tensor in own.collate(seen).items():
        assert torch.equal(tensor, found[name]), name
    text = own.insert_tokens(f"a\n{own.placeholder}b{own.placeholder}", seen[1:3])
    ids = own.tokenizer.encode(text, add_special_tokens=False)
    assert [p.end - p.begin for p in own.place_images(ids, seen[1:3], 0)] == [len(own.expand(p).ids) for p in seen[1:3]]
    soft = own.tokenizer.convert_tokens_to_ids(own.family.token)
    assert ids.count(soft) == sum(len(own.expand(p).ids) - 2 for p in seen[1:3])


def test_pan_and_scan_of_gemma_is_refused(tmp_path):
    folder = seeing.save_model(tmp_path, "gemma3")
    file = tmp_path / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"do_pan_and_scan": True}))
    with pytest.raises(UserError, match=r"pan and scan.* set do_pan_and_scan to false"):
        ImageProcessor(folder)
    file.write_text(json.dumps(settings | {"size": {"height": 32, "width": 32}}))
    with pytest.raises(UserError, match=r"4 tokens of an image of 32 x 32 pixels, and its model takes 4 of 16 x 16"):
        ImageProcessor(folder)
