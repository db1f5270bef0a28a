"""Which settings are hidden before a configuration is stored."""

from __future__ import annotations

from configs.eval_schema import EvalConfig
from configs.load import list_keys
from configs.schema import RLConfig, SLConfig
from core.text.secrets import HIDDEN, hide_settings

SECRET = (
    *("token", "github_token", "slack_bot_token", "HF_TOKEN", "accessToken", "api_key", "apiKey", "X-API-Key"),
    *("openai_key", "OPENAI_API_KEY", "secret_key", "my_private_key", "AWS_SECRET_ACCESS_KEY", "client_secret"),
    *("Authorization", "proxy-authorization", "passphrase", "db_password"),
    *("some_new_service_key", "x-goog-key", "wandbKey", "apikey", "answer_api_key"),
    *("openAIKey", "hfkey", "OPENAIKEY"),
)
OPEN = (
    *("stop_token", "eos_token", "end_of_turn_token", "image_token", "per_token", "max_tokens", "tokenizer"),
    *("key", "answer_key", "sort_key", "keys", "author", "answerKey", "reward_fn_key", "primary-key", "monkey"),
)


def test_secrets_are_hidden_and_words_like_them_are_not():
    shown = hide_settings({"headers": dict.fromkeys([*SECRET, *OPEN], "x")})["headers"]
    assert {name for name, value in shown.items() if value == HIDDEN} == {*SECRET}


def test_no_key_of_the_schema_is_hidden():
    keys = [key for cls in (RLConfig, SLConfig, EvalConfig) for key in list_keys(cls)]
    assert HIDDEN not in hide_settings({key.rpartition(".")[2]: "x" for key in keys}).values()
