"""Settings from flags, environment variables and a file, in this order of precedence."""

from pathlib import Path

import pytest
from bundles import changed_manifest
from rich.console import Console

from aftexport.errors import UsageError
from aftserve.ray.deployment import DeploymentSettings
from aftserve.server import load
from aftserve.settings import Settings

TIMES = ("drain", "shutdown", "stall", "receive", "keep-alive", "deadline", "max-queue")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "aftserve.toml"
    path.write_text('host = "0.0.0.0"\nport = 1\nmax_tokens = 10\n')
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shadow", "0.1"), "--shadow needs a model with --reference, or whose documents may"),
        (("--reference-factory", "a:b"), "--reference-factory needs --reference"),
        (("--max-array-mib", "8"), "--max-array-mib needs a model of features"),
    ],
)
def test_setting_without_effect_is_refused(
    words: tuple[str, ...], message: str, bundle_copy: Path
) -> None:
    changed_manifest(bundle_copy, {"batching": False})
    settings = Settings.read([str(bundle_copy), *words])
    with pytest.raises(UsageError, match=message):
        load(settings, Console(quiet=True))


def test_flag_overrides_environment_and_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTSERVE_PORT", "2")
    monkeypatch.setenv("AFTSERVE_MAX_TOKENS", "20")
    settings = Settings.read(["bundle", "--config", str(file), "--max-tokens", "30"])
    assert (settings.host, settings.port, settings.max_tokens) == (["0.0.0.0"], 2, 30)


def test_environment_names_file_and_bundle(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTSERVE_CONFIG", str(file))
    monkeypatch.setenv("AFTSERVE_BUNDLES", "model.bundle")
    settings = Settings.read([])
    assert settings.bundle == Path("model.bundle")
    assert settings.port == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("color = 1", "color in the file of --config is not a setting"),
        ("max_token = 1", "max_tokens"),
        ("port = 'x'", "--port"),
        ("port =", "aftserve.toml"),
        ("[models.a.v1]\nshadow = 1", r'Write \[models\."a\.v1"\] if a\.v1 is the name'),
        ("[models.a.v1.2]\nshadow = 1", r'Write \[models\."a\.v1\.2"\]'),
        ("[models.a]\nreferense = 'x'", r"\[models\.a\] referense .* see reference or"),
        ("[models.'a b']\nport = 1", r'\[models\."a b"\] port .* is not a setting of a model'),
        ("[models.a]\nshadow = 2", r"models\.a\.shadow in the file of --config"),
        ("[models.a]\nshadow = true", r"models\.a\.shadow .* or a text, got a boolean"),
        ("port = true", "--port: expected a number or a text, got a boolean"),
        ("shadow = false", "--shadow: expected a number or a text, got a boolean"),
        ("host = true", "--host: expected a number or a text, got a boolean"),
    ],
)
def test_invalid_file_names_the_cause(content: str, message: str, file: Path) -> None:
    file.write_text(content)
    with pytest.raises(UsageError, match=message):
        Settings.read(["bundle", "--config", str(file)])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml"):
        Settings.read(["bundle", "--config", str(tmp_path / "absent.toml")])


@pytest.mark.parametrize(
    "words",
    [
        ["--shadow", "2"],
        ["--deadline-seconds", "0"],
        ["--max-queue-seconds", "-1"],
        ["--budget-tokens", "0"],
        ["--host", ""],
        ["--port", "65536"],
        ["--max-tokens", "1048577"],
        ["--max-body-mib", "inf"],
        ["--memory-budget-mib", "inf"],
        ["--shutdown-seconds", "inf"],
        ["--max-queue-seconds", "inf"],
        ["--idle-seconds", "nan"],
        *[[f"--{name}-seconds", "1e300"] for name in TIMES],
        ["--threads", "1025"],
        ["--max-array-mib", "1e300"],
        ["--model-name", "organization/model"],
        ["--log-level", "verbose"],
    ],
)
def test_value_out_of_range_names_flag(words: list[str]) -> None:
    with pytest.raises(UsageError, match=words[0]):
        Settings.read(["bundle", *words])


@pytest.mark.parametrize(
    "words", [[""], *(["bundle", f"--{name}", ""] for name in ("spill", "api-keys", "reference"))]
)
def test_empty_path_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{(words[1:] or ['bundle'])[0]}: the path is empty"):
        Settings.read(words)


@pytest.mark.parametrize(
    "given",
    ["https://a.example,http://b.example:81", '["https://a.example","http://b.example:81"]'],
)
def test_origins_are_read_from_environment(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["https://a.example", "http://b.example:81"]
    assert Settings.read(["bundle", "--cors-origins", given]).cors_origins == expected
    monkeypatch.setenv("AFTSERVE_CORS_ORIGINS", given)
    assert Settings.read(["bundle"]).cors_origins == expected
    monkeypatch.setenv("AFTSERVE_CORS_ORIGINS", "")
    assert Settings.read(["bundle"]).cors_origins == []


@pytest.mark.parametrize(
    "given",
    [
        "[",
        "https://a.example/",
        "a.example",
        "https//a.example",
        "https://A.example",
        "https://a, *",
    ],
)
def test_invalid_origin_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTSERVE_CORS_ORIGINS", given)
    with pytest.raises(UsageError, match="--cors-origins"):
        Settings.read(["bundle"])


@pytest.mark.parametrize("name", sorted({*Settings.model_fields} - {"api_keys", "models"}))
def test_empty_variable_counts_as_unset(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"AFTSERVE_{name.upper()}", "")
    assert Settings.read([]) == Settings()


@pytest.mark.parametrize(
    "words", [["--host", "::1", "--host", "a"], ["--host", "::1,a"], ["--host", '["::1","a"]']]
)
def test_several_hosts_are_read(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.read(["bundle", *words]).host == ["::1", "a"]
    monkeypatch.setenv("AFTSERVE_HOST", words[1])
    assert Settings.read(["bundle"]).host[0] == "::1"


def test_unix_socket_replaces_default_port(monkeypatch: pytest.MonkeyPatch) -> None:
    default = ["127.0.0.1"]
    assert Settings.read(["bundle"]).port_hosts == default
    assert Settings.read(["bundle", "--uds", "s"]).port_hosts == []
    assert Settings.read(["bundle", "--uds", "s", "--port", "1"]).port_hosts == default
    assert Settings.read(["bundle", "--uds", "s", "--host", "::"]).port_hosts == ["::"]
    monkeypatch.setenv("AFTSERVE_PORT", "1")
    assert Settings.read(["bundle", "--uds", "s"]).port_hosts == default


def test_empty_api_keys_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTSERVE_API_KEYS", "")
    with pytest.raises(UsageError, match="AFTSERVE_API_KEYS is empty"):
        Settings.read(["bundle"])


def test_malformed_table_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTSERVE_RAY", "{")
    with pytest.raises(UsageError, match="ray"):
        DeploymentSettings.read(["bundle"])


def test_kubernetes_service_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "AFTSERVE_SERVICE_HOST": "10.0.0.1",
        "AFTSERVE_SERVICE_PORT": "80",
        "AFTSERVE_SERVICE_PORT_HTTP": "80",
        "AFTSERVE_PORT": "tcp://10.0.0.1:80",
        "AFTSERVE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "AFTSERVE_PORT_80_TCP_PROTO": "tcp",
        "AFTSERVE_PORT_80_TCP_PORT": "80",
        "AFTSERVE_PORT_80_TCP_ADDR": "10.0.0.1",
        "AFTSERVE_V2_PORT": "tcp://10.0.0.2:80",
        "AFTSERVE_GRPC_PORT": "tcp://10.0.0.3:80",
        "AFTSERVE_V2_SERVICE_HOST": "10.0.0.2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Settings.read(["bundle"]).port == Settings.model_fields["port"].default


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("AFTSERVE_API_KEY", "AFTSERVE_API_KEYS"),
        ("aftserve_max_token", "AFTSERVE_MAX_TOKENS"),
        ("AFTSERVE_MAX_BODY_MB", "AFTSERVE_MAX_BODY_MIB"),
        ("AFTSERVE_THREAD", "AFTSERVE_THREADS"),
        ("AFTSERVE_API_KEYS_FILE", "AFTSERVE_API_KEYS"),
        ("AFTSERVE_SOMETHING", "aftserve --help"),
        ("AFTSERVE_MODELS", "AFTSERVE_MODELS is not a setting"),
    ],
)
def test_unknown_variable_is_refused(
    name: str, suggestion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(UsageError, match=suggestion):
        Settings.read(["bundle"])


def test_only_port_may_be_kubernetes_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTSERVE_HOST", "tcp://10.0.0.1:80")
    assert Settings.read(["bundle"]).host == ["tcp://10.0.0.1:80"]


def test_variable_names_ignore_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("aftserve_port", "81")
    assert Settings.read(["bundle"]).port == 81


def test_absolute_paths_have_references_of_models(file: Path) -> None:
    file.write_text('[models.a]\nreference = "a.pt"\n[models.b]\nshadow = 1\n')
    settings = Settings.read(["bundle", "--config", str(file), "--spill", "spill"])
    moved = settings.model_copy(update=settings.absolute_paths)
    assert moved.of_model("a").reference == Path.cwd() / "a.pt"
    assert moved.of_model("b") == moved.model_copy(update={"shadow": 1})
    assert (moved.bundle, moved.spill) == (Path.cwd() / "bundle", Path.cwd() / "spill")


@pytest.mark.parametrize("words", [["[::1]"], ["::1"], ["[::1],127.0.0.1"], ['["[::1]"]']])
def test_host_may_be_in_brackets(words: list[str]) -> None:
    hosts = Settings.read(["bundle", "--host", *words]).host
    assert hosts == ["::1", "127.0.0.1"][: len(hosts)]
    assert Settings.read(["bundle", "--allowed-hosts", "[::1]"]).allowed_hosts == ["[::1]"]
