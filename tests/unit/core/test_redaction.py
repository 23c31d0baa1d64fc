"""Secrets are taken out, wherever they stand; what only looks like one stays readable."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilience_sdk.core.redaction import LEAST_LENGTH, REDACTED, redact, redact_argv, redact_text

SECRET = "Zq8-x_91LmPq"
BLANKS = string.whitespace + "\"'"
TEXTS = [
    "token={}",
    "Token: {}",
    'Client(token="{}")',
    "HF_TOKEN={} was refused",
    "hf-token={}",
    "{{'password': '{}', 'user': 'me'}}",
    '{{"api_key": "{}"}}',
    "passphrase = {}",
    "wandb.api_key={}",
    'api_key="a b {} c"',
    '{{"api_key": "abc\\"{}"}}',
    "cut off: token='{}",
    "train.py --hf-token {} --lr 1",
    "mysql --password {}",
    "Your API key: {}0123",
    "[('Authorization', 'Bearer {}')]",
    "curl -H 'Authorization: token {}'",
    "Server=db;Pwd={};",
    "https://{}01234567@o1.ingest.example/2",
    "aws_session_token = {}",
    "ACCESS_KEY={}",
    "Authorization: Bearer {}",
    "authorization: basic {}",
    "{{'Authorization': 'Bearer {}'}}",
    "-H 'Proxy-Authorization: {}'",
    "Cookie: session={}; theme=dark",
    "Set-Cookie: id={}",
    "X-Api-Key: {}",
    "x-auth-token: {}",
    "bearer {}",
    "GET https://me:{}@host/x",
    "https://host/x?sig={}&v=1",
    "https://host/x?v=1&X-Amz-Signature={}",
    "https://host/x?key={}",
    "https://host/x?access_token={}#top",
    "AccountKey={};EndpointSuffix=core.windows.net",
    "client_secret: {}",
    "aws_secret_access_key = {}",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\n{}\ncut off here",
]
secrets_of_any_kind = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="\"'\\,;&)]}<>#@/?:=%"),
    min_size=12,
    max_size=60,
).filter(lambda text: not text.isdigit() and not text.isalpha())


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_name_a_place_or_a_frame_tells_is_taken_out(text):
    """In any case, with any quotes, in the middle of other words."""
    told = f"RuntimeError: it failed: {text.format(SECRET)}\n  and went on"
    assert SECRET not in redact_text(told)
    assert REDACTED in redact_text(told)
    assert redact_text(told).startswith("RuntimeError: it failed: ")


@given(secrets_of_any_kind, st.sampled_from(["token={}", "Authorization: Bearer {}", "https://u:{}@h/", "SOME_KEY={}"]))
def test_any_secret_behind_a_name_is_taken_out(secret, text):
    """Whatever it is made of, as long as it is one word."""
    assert secret not in redact_text(f"before {text.format(secret)} after")


@given(st.text(min_size=LEAST_LENGTH, max_size=60).filter(lambda text: text.strip() == text), st.text(), st.text())
def test_the_value_of_a_secret_variable_is_in_no_text(secret, before, after):
    """As it is, in a representation of it, in JSON or in an address; also one with blanks and quotes in it."""
    if "\0" in secret or any("\ud800" <= character <= "\udfff" for character in secret) or secret in REDACTED:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_SERVICE_SECRET", secret)
        for form in (secret, repr(secret), json.dumps(secret)):
            assert secret not in redact_text(f"{before}{form}{after}").replace(REDACTED, "")
        assert redact({"why": f"said {secret}!"}) == {"why": f"said {REDACTED}!"}


@pytest.mark.parametrize(
    "known",
    [
        {"HF_TOKEN": "1234567"},
        {"DEBUG_KEY": "true"},
        {"TOKENIZERS_PARALLELISM": "disabled!"},
        {"TLS_KEY_FILE": "/etc/key.pem"},
    ],
)
def test_a_short_value_and_a_place_take_no_words_out(monkeypatch, known):
    """Else `true`, or a path, would be cut out of every sentence."""
    for name, value in known.items():
        monkeypatch.setenv(name, value)
        assert redact_text(f"it was {value} then") == f"it was {value} then"


@pytest.mark.parametrize(
    "text",
    [
        "KeyError: 'step'",
        "KeyError: 'model.layers.0.weight'",
        "SyntaxError: unexpected token: function",
        "num_tokens: 4096, max_tokens=8192",
        "pad_token='<pad>' eos_token=</s>",
        "tokenizer: gpt2-large-cased",
        "AutoTokenizer.from_pretrained(tokenizer_name='gpt2-medium')",
        "backward pass: 3 of 4",
        "passed=12 bypass=True",
        "signal: SIGTERM, signature=(a, b)",
        "https://docs.pytorch.org/docs/stable/index.html#token",
        "tcp://10.0.0.1:29500",
        "key=rank-3 of the store",
        "the author: somebody",
        "token_type_ids=tensor([[0, 0]])",
        "input_ids token: 50257 out of range",
        "Missing key(s) in state_dict: 'x.weight'",
        "unexpected keyword argument 'key_padding_mask'",
        "size mismatch for key_proj.weight: torch.Size([3])",
        "store key: rank_3",
        "--max-tokens 4096 --pad-token <pad> --use-key --lr 1",
        "cookie: none",
        "Token indices sequence length is longer: 1025 > 1024",
        'File "/home/me/train.py", line 12 in <module>',
    ],
)
def test_what_is_no_secret_stays(text):
    """Diagnosis lives of these words."""
    assert redact_text(text) == text


def test_fields_are_taken_out_by_their_names():
    """In records of any depth; numbers and lists too."""
    record = {"a": [{"webhook_url": "x", "n": 1}], "api_key": 7, "why": f"token={SECRET}", "my-jwt": ["x"]}
    told = {"a": [{"webhook_url": REDACTED, "n": 1}], "api_key": REDACTED, "why": f"token={REDACTED}"}
    assert redact(record) == {**told, "my-jwt": [REDACTED]}


def test_measures_and_switches_are_no_secrets():
    """What a run counts stays, whatever it is called."""
    record = {
        "tokens_per_s": 8192.5,
        "passes": 3,
        "forward_pass": 0.1,
        "has_key": True,
        "tokenizer": "gpt2",
        "key": None,
    }
    assert redact(record) == record


def test_a_text_is_read_in_time_that_grows_with_its_length():
    """A mebibyte of what patterns begin with would take hours by any that tries all lengths at each place."""
    for piece in (
        "a",
        "key",
        "token=",
        "://a:",
        "Authorization: ",
        "-----BEGIN PRIVATE KEY-----",
        "a_",
        "eyJ-",
        "sk-",
        "?a&",
        "'",
    ):
        redact_text(piece * ((1 << 20) // len(piece)))


@given(st.one_of(st.text(), st.lists(st.sampled_from([*TEXTS, "=", ":", " ", "'", "token"])).map("".join)))
def test_what_was_redacted_is_not_redacted_again(text):
    """Texts pass through several hands: rank, launcher, store."""
    once = redact_text(text)
    assert redact_text(once) == once


def test_a_command_line_keeps_its_other_words():
    """Names of options tell."""
    words = ["train.py", "--api-key", "x", "--lr", "1", f"https://me:{SECRET}@host"]
    assert redact_argv(words) == ["train.py", "--api-key", REDACTED, "--lr", "1", f"https://me:{REDACTED}@host"]


def test_a_key_is_a_text_like_any_other() -> None:
    """It may be the name of a section, a metric or a part of the state."""
    told = redact({"part of token=abcdefgh12345678": {"n": 1}, "forward": 2})
    assert told == {"part of token=[redacted]": {"n": 1}, "forward": 2}
