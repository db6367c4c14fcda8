"""Secrets by their form, wherever they come from; and texts that only look like one."""

import base64
import json

import pytest

from distcheck.errors.masking import (
    MASK,
    is_secret,
    mask_secret_patterns,
    masked_command,
    masked_json,
)

A40 = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hJ6kL9n"
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{A40}\n{A40}\n-----END RSA PRIVATE KEY-----"
BASIC = base64.b64encode(b"me:hunter2-of-mine").decode()
# Each with what must not be left of it.
FORMS = {
    "PEM": (PEM, A40), "PEM in JSON": (json.dumps({"key": PEM}), A40),
    "PEM that is cut": (PEM[:90], A40),
    "PEM that is quoted": ("> " + PEM.replace("\n", "\n> "), A40),
    "PEM as a list": (repr(PEM.splitlines(keepends=True)), A40),
    "quote in it": ('login(password="it\'s-hunter2")', "hunter2"),
    "escaped quote in it": (r'{"password": "a\"b-hunter2"}', "hunter2"),
    "comma in it": ("password: abc,hunter2,of", "hunter2"),
    "header of GitLab": ("PRIVATE-TOKEN: hunter2-of-mine", "hunter2"),
    "token in an address": ("https://host/x?token=hunter2-of-mine&b=1", "hunter2"),
    "token": (f'token = "{A40}"', A40), "pass": ("user=me pass=hunter2", "hunter2"),
    "name that ends in pw": ("db_pw=hunter2", "hunter2"),
    "curl": ("curl -s -u me:hunter2 https://host", "hunter2"),
    "pair": ("('DB_PASSWORD', 'hunter2')", "hunter2"),
    "XML": ("<password>hunter2</password>", "hunter2"),
    "block of YAML": ("password: |\n  hunter2\n", "hunter2"),
    "PEM with a rank before each line": ("[rank1]: " + PEM.replace("\n", "\n[rank1]: "), A40),
    "PuTTY": (f"Private-Lines: 2\n{A40}\n{A40}\nPrivate-MAC: 1", A40),
    "list of words": ("Command '['run', '--token', 'hunter2']' returned 1", "hunter2"),
    "digits": ("password=84736251", "8473"),
    "parentheses in it": ("password=Q7z(hunter2)", "hunter2"),
    "word of letters": ("password: correcthorse is wrong", "horse"),
    "header of bytes": ("(b'cookie', b'session=hunter2')", "hunter2"),
    "header in capitals": (f"AUTHORIZATION: basic {BASIC}", BASIC),
    "bearer": (f"bearer {A40}", A40), "Digest": (f'Digest username="me", response="{A40}"', A40),
    "variable in a dict": ("{'SENTRY_DSN': 'hunter2'}", "hunter2"), "Vault": (f"hvs.{A40}", A40),
    "number at its beginning": ("password=2024-hunter2", "hunter2"),
    "word at its beginning": ("--token null-hunter2", "hunter2"),
    "words in quotes": ('DB_PASSWORD="correct horse battery"', "battery"),
    "no space": ("password:hunter2", "hunter2"),
    "option in quotes": ("--token   'correct horse'", "horse"),
    "header of a key": ("X-Api-Key: correcthorse is wrong", "horse"),
    "list of headers": ('{"Authorization":["Bearer hunter2-of-mine"]}', "hunter2"),
    "PGP": (f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{A40}", A40),
    "JWT": (f"token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.{A40}", A40),
    "JWE": (f"eyJhbGciOiJSU0EtT0FFUCJ9.{A40}.{A40}.{A40}.{A40}", A40),
    "GitHub": (f"ghp_{A40[:36]} was refused", A40[:36]),
    "GitHub app": (f"ghs_{A40[:36]}", A40[:36]),
    "GitHub fine-grained": (f"github_pat_11ABC_{A40}", A40),
    "GitLab": (f"glpat-{A40[:20]}", A40[:20]), "Hugging Face": (f"hf_{A40[:34]}", A40[:34]),
    "AWS id": ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    "AWS temporary id": ("ASIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    "AWS key": (f"aws_secret_access_key = '{A40}'", A40),
    "AWS key of a file with blanks": (f"aws_secret_access_key = {A40}\n", A40),
    "AWS key of a file": (f"aws_secret_access_key={A40}", A40),
    "Google": (f"https://maps?key=AIza{A40[:35]}", A40[:35]), "Google OAuth": (f"ya29.{A40}", A40),
    "OpenAI": (f"sk-proj-{A40}", A40), "Anthropic": (f"sk-ant-api03-{A40}", A40),
    "Stripe": (f"sk_live_{A40[:24]}", A40[:24]),
    "Slack": (f"xoxb-123456789012-{A40[:24]}", A40[:24]),
    "Slack app": (f"xapp-1-A0-{A40[:24]}", A40[:24]), "SendGrid": (f"SG.{A40[:22]}.{A40}", A40),
    "npm": (f"npm_{A40[:36]}", A40[:36]), "PyPI": (f"pypi-AgEIcHlwaS5vcmc{A40}", A40),
    "Docker": (f"dckr_pat_{A40[:27]}", A40[:27]),
    "Databricks": (f"dapi{'0123456789abcdef' * 2}", "0123456789abcdef"),
    "Bearer": (f"Authorization: Bearer {A40}", A40), "Bearer alone": (f"sent Bearer {A40}", A40),
    "Basic": (f"sent Basic {BASIC}", BASIC),
    "Authorization": ("{'Authorization': 'Token hunter2-of-mine'}", "hunter2"),
    "Cookie": ("Cookie: session=hunter2-of-mine; a=b", "hunter2"),
    "address": ("connect to postgres://me:hunter2@host/db failed", "hunter2"),
    "address, @ in it": ("https://me:hunt@er2@host/x", "er2"),
    "address of a token": (f"git clone https://{A40[:20]}@host/x", A40[:20]),
    "netrc": ("machine host login me password hunter2", "hunter2"),
    "netrc of lines": ("machine host\n  login me\n  password hunter2\n", "hunter2"),
    "SAS": ("https://a.blob.core.windows.net/c?sv=2022&sig=hunter2%2Fof%3D", "hunter2"),
    "Azure": (f"DefaultEndpointsProtocol=https;AccountKey={A40}==;Endpoint=x", A40),
    "S3, signed": (f"https://b.s3.amazonaws.com/k?X-Amz-Signature={A40}", A40),
    "Slack webhook": (f"https://hooks.slack.com/services/T0/B0/{A40[:24]}", A40[:24]),
    "Discord webhook": (f"https://discord.com/api/webhooks/123/{A40}", A40),
    "a header without a blank": (f'curl -H "x-api-key:{A40}"', A40),
    "a name that begins with _": (f"_MY_TOKEN={A40}", A40),
    "Discord webhook, versioned": (f"https://discordapp.com/api/v10/webhooks/1/{A40}", A40),
    "Teams webhook": (f"https://x.webhook.office.com/webhookb2/{A40}", A40),
    "password": ("login(user='me', password='hunter2 of mine')", "hunter2"),
    "JSON": ('{"api_key": "hunter2-of-mine"}', "hunter2"),
    "JSON in JSON": (json.dumps({"text": '{"client_secret": "hunter2-of-mine"}'}), "hunter2"),
    "YAML": ("db_password: hunter2ofmine\n", "hunter2"),
    "YAML of letters": ("user: me\npassword: correcthorse\nport: 80", "horse"),
    "shell": ("export DB_PW=correcthorse; run", "horse"),
    "sentence": ('cannot unlock with passphrase "correct horse"', "horse"),
    "environment": ("WANDB_API_KEY=hunter2", "hunter2"),
    "option": ("train.py --api-key hunter2 --lr 0.1", "hunter2"),
    "option that begins with -": (f"train.py --token=-{A40}", A40),
    "option pw": ("sync --pw correcthorse", "horse"),
    "three quotes": ('password = """hunter2"""', "hunter2"),
    "three single quotes": ("api_key='\'\'hunter2\'\''", "hunter2"),
    "any token in lower case": (f"my_token={A40}", A40), "any token": (f"Bus_Token = '{A40}'", A40),
    "a quoted name": ('"MY_TOKEN"="hunter2"', "hunter2"),
    "arrow": ("'password' => 'hunter2'", "hunter2"),
    "item of the environment": ("os.environ['WANDB_API_KEY'] = 'hunter2'", "hunter2"),
    "item of an upper-case name": ("environ['MY_KEY'] = 'hunter2'", "hunter2"),
    "annotated": ("api_key: str | None = 'hunter2'", "hunter2"),
    "walrus": ("(password := 'hunter2')", "hunter2"),
    "host in capitals": (f"HTTPS://HOOKS.SLACK.COM/services/T0/B0/{A40}", A40),
    "host with a capital": (f"https://Discord.com/api/webhooks/1/{A40}", A40),
    "option with =": ("train.py --hub_token=hunter2", "hunter2"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_secret_is_masked(name: str) -> None:
    text, secret = FORMS[name]
    masked = mask_secret_patterns(f"it said: {text}")
    assert secret not in masked
    assert MASK in masked
    assert masked.startswith("it said: ")
    assert mask_secret_patterns(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "layers.0.attention.key.weight is float32 of shape (2, 3)",
        "lm_head.token_embedding: was 0.1234567890, is 0.1234567891",
        '{"key.weight": [1, 2], "token_embedding.bias": "0x1.8p+3", "secret_gate": "abcdefgh"}',
        "KeyError: 'optimizer.param_groups.0.key'",
        "SHA-256 14babb7e8dbcb300b39fde041408f42a, XXH3 1f2e3d4c5b6a79880f1e2d3c4b5a6978",
        "commit 69b4016c0d5e4f7a8b9c0d1e2f3a4b5c6d7e8f90 of main",
        "digest 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "distcheck verify --strategy sync.py:token_weighted --loss tokens --world 4",
        "--arg tokens=512 --arg key=3 --token-embedding-dim 512 --max-tokens 4096",
        "tokenizer=AutoTokenizer.from_pretrained(name), pad_token='<pad>', eos_token_id=50256",
        "unknown parameters secret; pass --arg secret=VALUE",
        "Basic misunderstandings of Bearer authentication",
        "http://127.0.0.1:8000/page tcp://host:29500 file:///home/me/x.py ssh://ubuntu@host",
        "see https://a:80/b@c and user@host, 3e-05@step",
        "sk-learn-contrib-a-long-package-name, hf_transfer_enabled, glue-and-others",
        "all_reduce(tensor, op=ReduceOp.SUM, async_op=True) at sync.py:12",
        "AKI ASIA AIzawa xoxo npm_config_registry pypi-mirror-of-the-company eyJ",
        "password=None, api_key=None, use_auth_token=True, secret: str, passwd=0",
        "query_key_value.weight: expected 1.5e-3, rank 1 has 2.5e-3",
        "the token 50257 of vocab; PRIVATE KEY of attention",
        "BEST_PAT=12.5 GRAD_KEY=0.12345678 KEY_BITS=2048 AUTH=true Authorization = None",
        "xoxo-loves-you PAD_TOKEN='<pad>' BOS_TOKEN=begin_of_text UNEXPECTED_KEY=layer.0.weight",
        "login(password=args.password, token=None)",
        "--pass-through --pass 2 --passes 3; api_key: str = None; password: str | None = None",
        "next_token=5 first_token = 'begin_of_text' pad_token=layer_norm, STATE['KEY_OF'] = 'x'",
    ],
)  # fmt: skip
def test_an_innocent_text_stays(text: str) -> None:
    assert mask_secret_patterns(text) == text


@pytest.mark.parametrize("name", FORMS)
def test_a_document_stays_one(name: str) -> None:
    text, secret = FORMS[name]
    around = f'the "{text}" of\n"{text}"'
    masked = masked_json(json.dumps({"a": [around, 1], around: None}, indent=1))
    assert secret not in masked
    assert json.loads(masked)["a"][1] == 1


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("AWS_ACCESS_KEY_ID", True), ("CLIENT_SECRET_ID", True), ("DB_PW_ID", True),
        ("DB_PW", True), ("PGPASSWORD", True), ("AZURE_STORAGE_SAS", True),
        ("SIGNINGKEY", True), ("AUTHORIZATION", True), ("SESSION_TOKEN_ID", False),
        ("SSH_KEY_PATH", False), ("MONKEYS", False), ("TOKENIZERS_PARALLELISM", True),
    ],
)  # fmt: skip
def test_a_variable_is_secret_by_its_name(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_a_command_is_masked_word_by_word() -> None:
    command = "torchrun train.py --wandb-token 'hunter2 of mine' --lr 0.1 --name 'a b'"
    assert (
        masked_command(command)
        == "torchrun train.py --wandb-token '[masked]' --lr 0.1 --name 'a b'"
    )
    assert masked_command("python 'train.py' --lr 0.1") == "python 'train.py' --lr 0.1"
