import pytest

from perdure.backends.libsql.address import is_remote, parse_url


@pytest.mark.parametrize(
    ("url", "leads_to"),
    [
        ("libsql://db-me.turso.io", "https://db-me.turso.io"),
        ("libsql://h:8080?tls=0", "http://h:8080"),
        ("libsql://h:8080/ns/?tls=1", "https://h:8080/ns"),
        ("https://h", "https://h"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("wss://h", "https://h"),
        ("ws://h:81", "http://h:81"),
        ("http://[::1]:8080", "http://[::1]:8080"),
        ("https://h:443", "https://h"),
    ],
)
def test_every_form_of_url_leads_to_its_server(url: str, leads_to: str) -> None:
    assert is_remote(url)
    assert parse_url(url).address.url == leads_to


@pytest.mark.parametrize("url", ["file:./x.db", "x.db", "/abs/x.db", "./libsql/x.db"])
def test_paths_are_no_servers(url: str) -> None:
    assert not is_remote(url)


def test_tls_can_be_switched_off_for_libsql_only() -> None:
    assert parse_url("libsql://localhost:8080", tls=False).address.url == "http://localhost:8080"
    with pytest.raises(ValueError, match="contradicts"):
        parse_url("https://localhost", tls=False)
    with pytest.raises(ValueError, match="0 or 1"):
        parse_url("libsql://localhost?tls=no")


def test_a_token_in_the_url_is_found_and_not_shown() -> None:
    target = parse_url("libsql://h?authToken=secret")
    assert target.token == "secret"
    assert "secret" not in f"{target!r} {target.address!r} {target.address.label}"


@pytest.mark.parametrize(
    "url",
    [
        "libsql://user:secret@h", "libsql://h?authtoken=secret", "libsql://h?secret", "libsql://h:secret", "libsql://[secret",
        "libsql://?authToken=secret", "postgresql://h/secret", "libsql://h#secret",
    ],
)  # fmt: skip
def test_a_bad_libsql_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="libSQL URL") as refusal:
        parse_url(url)
    assert "secret" not in f"{refusal.value!r}{refusal.value.__cause__!r}"
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None
