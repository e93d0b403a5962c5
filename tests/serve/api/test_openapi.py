"""The OpenAPI document against the server's answers to requests generated from it."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from sampling import fewer
from servers import serving

from aftserve.api.api_keys import make_key

CONFIG = Path(__file__).with_name("schemathesis.toml")
SECONDS = str(fewer(25, 0.48))


def test_generated_requests_get_documented_answers(bundle_folder: Path, tmp_path: Path) -> None:
    key, section = make_key("admin", None, admin=True)
    (tmp_path / "keys.toml").write_text(section)
    options = ("--api-keys", str(tmp_path / "keys.toml"))
    with serving(bundle_folder, tmp_path / "log", *options) as (address, _):
        model = f"{address}/models/model"
        # A fixed seed makes every run send the same requests. Schemathesis does not resolve the
        # relative address of the document.
        words = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run",
                 f"{model}/openapi.json", "--url", model,
                 "--header", f"Authorization: Bearer {key}",
                 "--max-time", SECONDS, "--continue-on-failure", "--seed", "1"]  # fmt: skip
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "37 selected / 38 total" in done.stdout
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


@pytest.mark.parametrize(
    ("path", "methods"), [("/parity", "GET, HEAD, POST"), ("/infer", "POST"), ("/v2", "GET, HEAD")]
)
def test_wrong_method_gets_allowed_methods(path: str, methods: str, client: httpx.Client) -> None:
    answer = client.put(path)
    assert answer.status_code == 405
    assert answer.headers["Allow"] == methods


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/info", "/v2/health/ready"])
def test_head_request_gets_no_body(path: str, client: httpx.Client) -> None:
    answer, whole = client.head(path), client.get(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["Content-Type"] == whole.headers["Content-Type"]
    assert client.head("/infer").status_code == 405


def test_integral_float_is_token_id(client: httpx.Client) -> None:
    json = {"Content-Type": "application/json"}
    whole = client.post("/infer", content=b'{"input_ids": [[5.0, 6]]}', headers=json)
    assert whole.status_code == 200, whole.text
    assert client.post("/infer", json={"input_ids": [[5.5, 6]]}).status_code == 422


def test_schema_has_bundle_vocabulary(client: httpx.Client) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    forms = {form["required"][0]: form for form in schemas["InferRequest"]["oneOf"]}
    assert forms.keys() == {"text", "texts", "input_ids"}
    ids = forms["input_ids"]["properties"]["input_ids"]["items"]
    assert ids["items"] == {"type": "integer", "minimum": 0, "maximum": 299}
