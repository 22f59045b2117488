from perdure.backends.base.dsn import split_options


def test_options_of_ours_are_told_from_those_of_postgres() -> None:
    dsn, options = split_options("postgresql://u:p%40@h:1/d?sslmode=disable&table=shop&prefix=a%2Fb", {"table", "prefix"})
    assert (dsn, options) == ("postgresql://u:p%40@h:1/d?sslmode=disable", {"table": "shop", "prefix": "a/b"})
