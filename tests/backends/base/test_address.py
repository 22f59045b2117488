import pytest

from perdure.backends.base.address import ServerUrl, parse_server_url


def parse(url: object, *, strict: bool = True) -> ServerUrl:
    return parse_server_url(url, "Example", ("example", "examples"), "example://host/database", strict=strict)


def test_every_part_of_a_url_is_decoded() -> None:
    url = parse("Example://us%40er:p%2Fw@Host.test:99/my%20db?a=1&b=&a=2#part")
    assert (url.scheme, url.host, url.port, url.hosts) == ("example", "host.test", 99, "Host.test:99")
    assert (url.user, url.password, url.database, url.raw_path) == ("us@er", "p/w", "my db", "/my%20db")
    assert (dict(url.options), url.fragment) == ({"a": "2", "b": ""}, "part")


def test_several_hosts_have_no_single_port() -> None:
    url = parse("example://user:secret@one:1,two:2/database")
    assert (url.hosts, url.host, url.port, url.password) == ("one:1,two:2", None, None, "secret")


def test_a_comma_in_a_password_is_no_second_host() -> None:
    url = parse("example://user:a,b@one:1/database")
    assert (url.hosts, url.host, url.port, url.password) == ("one:1", "one", 1, "a,b")


def test_a_query_without_values_is_refused_only_if_strict() -> None:
    with pytest.raises(ValueError, match="the Example URL cannot be read"):
        parse("example://one/database?secret")
    assert dict(parse("example://one/database?secret", strict=False).options) == {"secret": ""}


@pytest.mark.parametrize(
    "url", ["other://secret", "secret", "example:secret", "example://one:secret", "example://[secret", "example://h?secret"]
)
def test_a_bad_url_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="Example URL") as refusal:
        parse(url)
    assert "secret" not in f"{refusal.value!r}"
    assert refusal.value.__suppress_context__ or refusal.value.__context__ is None


def test_credentials_are_not_in_the_representation() -> None:
    assert "secret" not in repr(parse("example://user:secret@one/database?token=secret"))
