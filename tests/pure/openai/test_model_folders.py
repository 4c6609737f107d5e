"""What the text files of a folder decide, seen through the endpoint: start tokens, end tokens and chat templates."""

from __future__ import annotations

import json

import pytest

from serve_app.text.model_files import read_text_files
from serve_app.text.token_bytes import TokenizerError
from tests.support.models.text_folders import BASE_END, CONFIG, PLAIN, START, TURN_END, opened, write_folder

HI = {"messages": [{"role": "user", "content": "Hi"}]}
X = {"messages": [{"role": "user", "content": "x"}]}


async def tokens(api, body, **fields):
    answer = await api.post("/tokenize", body | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


@pytest.mark.parametrize(("start", "ids"), [("<s>", [START]), ("<|im_start|> <s>", [257, START])])
async def test_one_start_token(endpoint, tmp_path, start, ids):
    written = start.replace(" ", "")
    folder = write_folder(tmp_path, start, bos_token="<s>", chat_template=written + PLAIN)
    api = endpoint([], model=opened(folder))
    plain = [*ids, *b"[user]Hi"]
    assert await tokens(api, HI) == plain
    assert await tokens(api, HI, add_special_tokens=True) == plain
    assert await tokens(api, {"prompt": f"{written}[user]Hi"}) == plain
    assert await tokens(api, {"prompt": "[user]Hi"}) == plain
    # What is written twice is there twice, and what is turned off is not added.
    assert await tokens(api, {"prompt": written * 2 + "x"}) == [*ids, *ids, ord("x")]
    assert await tokens(api, {"prompt": written + "x"}, add_special_tokens=False) == [*ids, ord("x")]
    assert await tokens(api, {"prompt": "x"}, add_special_tokens=False) == [ord("x")]
    assert await tokens(api, {"prompt": f"x{written}"}) == [*ids, ord("x"), *ids]
    body = {"prompt": [f"{written}[user]Hi", "[user]Hi"], "max_tokens": 1, "return_token_ids": True}
    answer = (await api.post("/v1/completions", body)).json()
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [plain, plain]
    assert answer["usage"]["prompt_tokens"] == 2 * len(plain)
    # Token ids are taken as they are.
    answer = (await api.post("/v1/completions", body | {"prompt": [*ids, *ids]})).json()
    assert answer["choices"][0]["prompt_token_ids"] == [*ids, *ids]


async def test_a_start_token_that_nobody_adds_is_as_written(endpoint, tmp_path):
    api = endpoint([], model=opened(write_folder(tmp_path, bos_token="<s>")))
    assert await tokens(api, {"prompt": "<s><s>x"}) == [START, START, ord("x")]
    assert await tokens(api, {"prompt": "<s>x"}) == [START, ord("x")]


def forced(request):
    """A model that says the token of its logit bias for ever."""
    return list(request.sampling.logit_bias) * 100


ENDS = {
    "a text": ({"eos_token": "<|im_end|>"}, None),
    "an object": ({"eos_token": {"content": "<|im_end|>", "lstrip": False, "special": True}}, None),
    "beside generation_config.json": ({"eos_token": "<|im_end|>"}, {"eos_token_id": [BASE_END]}),
    "in generation_config.json": ({}, {"eos_token_id": TURN_END}),
}


@pytest.mark.parametrize("name", ENDS)
async def test_every_end_token_ends(endpoint, tmp_path, name):
    tokenizer_config, generation_config = ENDS[name]
    folder = write_folder(tmp_path, **tokenizer_config)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    api = endpoint(forced, model=opened(folder))
    for end in (TURN_END, BASE_END):
        body = {"prompt": "Hi", "max_tokens": 20, "temperature": 0, "logit_bias": {str(end): 100}}
        choices, answer = await api.both("/v1/completions", body)
        assert (choices[0]["text"], choices[0]["finish_reason"], choices[0]["stop_reason"]) == ("", "stop", None)
        assert answer.chunks[-1]["usage"]["completion_tokens"] == 1
        choices, answer = await api.both("/v1/completions", body | {"ignore_eos": True})
        assert choices[0]["finish_reason"] == "length"
        assert answer.chunks[-1]["usage"]["completion_tokens"] == 20


def test_end_tokens_of_older_and_odd_files(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert opened(folder).eos_token_ids == (BASE_END, TURN_END)
    # As in transformers, a tokenizer_config.json that lists the added tokens is complete.
    assert opened(write_folder(tmp_path, added_tokens_decoder={})).eos_token_ids == (BASE_END,)
    (folder / "special_tokens_map.json").unlink()
    for odd in (None, 3, ["<|im_end|>"], {"content": None}, "no such token"):
        assert opened(write_folder(tmp_path, eos_token=odd)).eos_token_ids == (BASE_END,)
    nested = {"model_type": "gemma3", "text_config": {**CONFIG, "eos_token_id": 1}, "eos_token_id": [BASE_END, 2]}
    assert opened(write_folder(tmp_path, config=nested, eos_token="<|im_end|>")).eos_token_ids == (1, BASE_END, 2, TURN_END)


def template_json(word):
    return json.dumps({"chat_template": "{% for m in messages %}" + word + "{{ m.content }}{% endfor %}"})


async def test_templates_in_their_order(endpoint, tmp_path):
    folder = write_folder(tmp_path)
    files = [
        ("processor_config.json", template_json("P")),
        ("tokenizer_config.json", template_json("T")),
        ("chat_template.json", template_json("J")),
        ("additional_chat_templates/default.jinja", "{% for m in messages %}D{{ m.content }}{% endfor %}"),
        ("chat_template.jinja", "{% for m in messages %}K{{ m.content }}{% endfor %}"),
    ]
    (folder / "additional_chat_templates").mkdir()
    for (name, content), expected in zip(files, "PTJDK", strict=True):
        (folder / name).write_text(content)
        api = endpoint([], model=opened(folder))
        assert await tokens(api, X) == [ord(expected), ord("x")]
        assert (await api.post("/v1/chat/completions", X | {"max_tokens": 1})).status_code == 200


NAMED = [{"name": "tool_use", "template": "T"}, {"name": "rag", "template": "R"}]


async def no_default(endpoint, folder, names):
    model = opened(folder)
    api = endpoint([ord("a")], model=model)
    assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1})).status_code == 200
    answer = await api.post("/v1/chat/completions", X)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert f"named default, only {names};" in answer.json()["error"]["message"]
    assert model.template_names == tuple(names.split(", "))


async def test_named_templates_without_a_default(endpoint, tmp_path):
    folder = write_folder(tmp_path, chat_template=NAMED)
    await no_default(endpoint, folder, "rag, tool_use")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "poem.v2.jinja").write_text("P")
    await no_default(endpoint, folder, "poem.v2, rag, tool_use")
    await no_default(endpoint, write_folder(folder), "poem.v2")
    await no_default(endpoint, write_folder(folder, chat_template={"rag": "R"}), "poem.v2, rag")
    # A default from any of the files is enough.
    (folder / "chat_template.json").write_text(template_json("J"))
    assert await tokens(endpoint([], model=opened(folder)), X) == [*b"Jx"]


async def test_a_folder_without_any_template(endpoint, tmp_path):
    answer = await endpoint([], model=opened(write_folder(tmp_path))).post("/v1/chat/completions", X)
    assert answer.status_code == 400
    assert "has no chat template; use /v1/completions, or add chat_template.jinja" in answer.json()["error"]["message"]


ENCODINGS = {"bom": "utf-8-sig", "utf-16": "utf-16", "utf-16-be": "utf-16-be"}


def write_as(file, text, encoding):
    """The file as an editor of another system writes it, its byte order mark included."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    file.write_bytes((mark + text).replace("\n", "\r\n").encode(encoding))


@pytest.mark.parametrize("name", ENCODINGS)
async def test_a_template_file_of_another_editor(endpoint, tmp_path, name):
    folder = write_folder(tmp_path)
    source = "{% for m in messages %}\nK{{ m.content }}é\n\n{% endfor %}\n{{ 'end' }}\n"
    (folder / "chat_template.jinja").write_text(source)
    expected = await tokens(endpoint([], model=opened(folder)), X)
    assert bytes(expected) == "Kxé\n\nend".encode()
    write_as(folder / "chat_template.jinja", source, ENCODINGS[name])
    assert await tokens(endpoint([], model=opened(folder)), X) == expected
    (folder / "chat_template.jinja").unlink()
    # The mark and the line ends may also have come into a JSON file with the template's text.
    for written in ("\ufeff" + source, source.replace("\n", "\r\n"), source.replace("\n", "\r")):
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": written}))
        assert await tokens(endpoint([], model=opened(folder)), X) == expected


@pytest.mark.parametrize("encoding", ENCODINGS.values())
def test_every_text_file_of_another_editor(tmp_path, encoding):
    folder = write_folder(tmp_path, "<s>", bos_token="<s>")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {TURN_END}}}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "default.jinja").write_text("{{ bos_token }}é\n")
    (folder / "chat_template.json").write_text('{"chat_template": [{"name": "rag", "template": "R"}]}')
    (folder / "processor_config.json").write_text('{"chat_template": {"poem": "P"}}')
    before = opened(folder)
    assert (before.eos_token_ids, before.bos_token_id) == ((BASE_END, TURN_END), 257)
    assert before.template_names == ("default", "poem", "rag")
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) == 8
    for file in files:
        write_as(file, file.read_text(), encoding)
    after = opened(folder)
    assert after.template.render([]) == before.template.render([]) == "<|im_start|>é"
    assert after.tokenizer.encode("é") == before.tokenizer.encode("é") == [START, 0xC3, 0xA9]
    assert (after.eos_token_ids, after.bos_token_id, after.template_names, after.vocab_size) == (
        (before.eos_token_ids, before.bos_token_id, before.template_names, before.vocab_size)
    )


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("chat_template.jinja", b"K\xff", "cannot be read as text"),
        ("additional_chat_templates/rag.jinja", b"\xff\xfe\x00", "cannot be read as text"),
        ("tokenizer_config.json", b"\xff{}", "is not JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "is not JSON"),
        ("chat_template.json", b"[]", "must hold a JSON object, but holds a list"),
        ("chat_template.json", b'{"chat_template": 3}', "chat_template must be a text"),
        ("chat_template.json", b'{"chat_template": ["x"]}', "chat_template must be a text"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "rag"}]}', "chat_template must be a text"),
        ("tokenizer_config.json", b'{"chat_template": [{"template": "R"}]}', "chat_template must be a text"),
        ("tokenizer.json", b"\xff", "is not a tokenizer file"),
    ],
)
def test_text_files_that_cannot_be_used_are_named(tmp_path, name, content, what):
    folder = write_folder(tmp_path)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=what) as refused:
        read_text_files(folder)
    assert str(folder / name) in str(refused.value)
