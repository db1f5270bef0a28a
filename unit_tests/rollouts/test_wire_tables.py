"""Parts of agents' requests, whatever the protocol: images, deadlines, parameters, and the refusals."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import pytest
from PIL import Image

from core.types.truncation import Truncation
from rollouts.agents.gateway import DIALECTS
from rollouts.agents.wire import (
    MOST_PIXELS,
    BadRequest,
    Parameters,
    check_body,
    check_fields,
    make_message,
    make_tool,
    read_call,
    read_max_tokens,
    read_part,
    read_stop,
    refuse_slow,
    write_event,
)
from unit_tests.helpers.sentences import tell

PARAMETERS = Parameters(read=("model", "read"), without_effect=("ignored",), neutral={"neutral": (3, 4), "top_p": (1,)})
SLOW = "the request was not received, parsed and rendered within 60 s: send less"


def refuse(call: Any) -> tuple[str, int, str | None, str | None]:
    with pytest.raises(BadRequest) as refused:
        call()
    return str(refused.value), refused.value.status, refused.value.param, refused.value.code


def draw(width: int, height: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_an_image_has_at_most_16_mi_pixels():
    part: Any = read_part(draw(4096, 4096), "x", math.inf)
    assert part["type"] == "image" and part["image"].width * part["image"].height == MOST_PIXELS == 4096**2
    said = "x: the image has 4096 x 4097 pixels, over 16777216 in all"
    assert refuse(lambda: read_part(draw(4096, 4097), "x", math.inf)) == (said, 400, "x", None)


@pytest.mark.parametrize(
    "part",
    [
        None,
        "text",
        {"type": "text"},
        {"type": "text", "text": 3},
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 3}},
        {"type": "image", "image_url": "data:,x"},
        {"type": "text", "image_url": "data:,x"},
    ],
)
def test_a_part_that_is_neither_text_nor_image_is_refused(part):
    said = "here must be a part of type text or image_url: the policy sees nothing else"
    assert refuse(lambda: read_part(part, "here", math.inf)) == (said, 400, "here", None)


def test_parts_are_text_and_images_in_data_uris():
    assert read_part({"type": "text", "text": "", "more": 1}, "x", math.inf) == {"type": "text", "text": ""}
    drawn = draw(3, 2)
    for url in (drawn["image_url"], drawn["image_url"]["url"]):
        part: Any = read_part({"type": "image_url", "image_url": url}, "x", math.inf)
        assert (part["image"].width, part["image"].height) == (3, 2)
        message = make_message("user", [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}])
        assert message == {
            **{"role": "user", "content": "ab"},
            "parts": [{"type": "text", "text": "a"}, part, {"type": "text", "text": "b"}],
        }
    assert make_message("tool", [{"type": "text", "text": "a"}] * 2) == {"role": "tool", "content": "aa"}
    assert make_message("user", []) == {"role": "user", "content": ""}
    said = "x: an image by its address is not fetched: send it as a data URI"
    address = {"type": "image_url", "image_url": "http://h/data:"}
    assert refuse(lambda: read_part(address, "x", math.inf)) == (said, 400, "x", None)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.path)
def test_a_request_that_is_late_is_read_no_further(dialect):
    kind = "input_text" if dialect.path == "responses" else "text"
    turns = [{"role": "user", "content": [{"type": kind, "text": "x"}]}]
    body = {"model": "policy", "input" if dialect.path == "responses" else "messages": turns}
    assert refuse(lambda: dialect.read(body, temperature=1.0, until=0.0)) == (SLOW, 413, None, None)
    assert dialect.read(body, temperature=1.0).messages == [{"role": "user", "content": "x"}]


def check(body: Any, **sampling: Any) -> Any:
    return check_body(body, PARAMETERS, **({"temperature": 0.5} | sampling))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"read": "x", "ignored": "y"},
        {"temperature": 0.5, "top_p": 0.25, "min_p": 0.125},
        {"neutral": 3},
        {"neutral": 4},
        dict.fromkeys(("temperature", "top_p", "neutral", "unknown")),
    ],
)
def test_parameters_that_are_read_neutral_or_those_of_the_run_pass(body):
    body = {"model": "policy", **body}
    assert check(body, truncation=Truncation(top_p=0.25, min_p=0.125)) is body


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (
            {"temperature": 0.75},
            "temperature is 0.75, and this run samples at rollout.temperature=0.5: ",
            "temperature",
        ),
        ({"top_p": 1}, "top_p is 1, and this run samples at rollout.top_p=0.25: ", "top_p"),
        # a rule that the run does not have
        ({"min_p": 0}, "min_p is not offered: the run decides how replies are sampled; ", "min_p"),
        ({"unknown": 3}, "unknown is not offered: the run decides how replies are sampled; ", "unknown"),
        (
            {"neutral": 5},
            "neutral is 5, and it would sample from another distribution than the one in training, or is not offered: ",
            "neutral",
        ),
    ],
)
def test_parameters_that_would_sample_otherwise_are_refused(body, said, param):
    body = {"model": "policy", **body}
    whole = (f"{said}leave it out", 400, param, None)
    assert refuse(lambda: check(body, truncation=Truncation(top_p=0.25))) == whole


def test_another_model_is_not_found():
    said = "the body of a request must be a JSON object with model and messages"
    assert refuse(lambda: check([])) == (said, 400, None, None)
    for body, name in (({}, "None"), ({"model": "gpt"}, "gpt"), ({"model": "policy "}, "policy ")):
        assert refuse(lambda body=body: check(body)) == (
            f"there is no model {name} here: it is called policy",
            404,
            "model",
            None,
        )


def read(arguments: Any, name: Any = "f") -> Any:
    return read_call(7, name, arguments, "here", key="input", form="{a, b}")


def test_a_call_has_an_object_as_its_arguments_or_the_text_of_one():
    for arguments, found in (({"x": 1}, {"x": 1}), ('{"x": [2]}', {"x": [2]}), ("", {}), ({}, {})):
        assert read(arguments) == {"id": "7", "type": "function", "function": {"name": "f", "arguments": found}}
    form = ("here must be {a, b} with a JSON object as input", 400, "here", None)
    for arguments, name in (([], "f"), ("3", "f"), (None, "f"), ({}, None), ("{}", 3)):
        assert refuse(lambda arguments=arguments, name=name: read(arguments, name)) == form
    assert refuse(lambda: read("{")) == ("here.input must be JSON", 400, "here", None)


def test_a_tool_has_only_the_parts_that_were_given():
    assert make_tool("f", None, None, None) == {"type": "function", "function": {"name": "f"}}
    assert make_tool("f", "", {}, False) == {
        "type": "function",
        "function": {"name": "f", "description": "", "parameters": {}},
    }
    assert make_tool("f", "d", {"a": 1}, True)["function"] == {
        **{"name": "f", "description": "d", "parameters": {"a": 1}},
        "strict": True,
    }


def test_the_smallest_limit_on_a_reply_counts():
    for body, limit in (({}, None), ({"a": None}, None), ({"b": 3}, 3), ({"a": 3, "b": 2}, 2), ({"a": 1, "b": 2}, 1)):
        assert read_max_tokens(body, "a", "b") == limit
    for body, found in (({"a": 0}, "0"), ({"b": -2}, "-2"), ({"a": 3, "b": True}, "True"), ({"a": 2.0}, "2.0")):
        said = f"a must be a whole number from 1 on, found {found}"
        assert refuse(lambda body=body: read_max_tokens(body, "a", "b")) == (said, 400, "a", None)
    assert len(tell(lambda: read_max_tokens({"a": "x" * 99}, "a"), BadRequest)) == len(said) - len("2.0") + 40


def test_stop_strings_are_a_text_or_several():
    for given, found in ((None, ()), ([], ()), ("x", ("x",)), (["x", "y"], ("x", "y"))):
        assert read_stop(given, "stop") == found
    for given in ("", {"x": 1}, [""], ["x", 3], 3):
        said = f"stops must be a text or a list of texts, none empty, found {given!r}"
        assert refuse(lambda given=given: read_stop(given, "stops")) == (said, 400, "stops", None)


def test_a_field_is_read_ignored_empty_or_refused():
    check_fields({"a": 1, "b": 2, "c": None, "d": [], "e": "", "f": False}, ("a",), "here", ignored=("b",))
    for value in (True, 1, "x", [0], {}):
        said = "here has c, which no chat template is shown: leave it out"
        whole = (said, 400, "here", None)
        assert refuse(lambda value=value: check_fields({"a": 1, "c": value}, ("a",), "here")) == whole


def test_a_refusal_is_written_as_openai_does():
    refusal = refuse_slow()
    assert (str(refusal), refusal.status) == (SLOW, 413)
    assert refusal.write() == {"error": {"message": SLOW, "type": "invalid_request_error", "param": None, "code": None}}
    plain = BadRequest("no")
    assert (plain.status, plain.param, plain.code) == (400, None, None)
    assert write_event({"type": "a", "x": 1}) == f"event: a\ndata: {json.dumps({'type': 'a', 'x': 1})}\n\n"
