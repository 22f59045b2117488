"""Run a campaign: `python -m tests.fuzz 0 1000 --store sqlite`."""

from __future__ import annotations

import argparse
import sys
import tempfile

from tests.fuzz.campaign import Settings, try_programs
from tests.fuzz.killed import run_killed
from tests.fuzz.programs import aimed_program, available, random_program


def main() -> int:
    """Run the programs of a range of seeds, and print every bad one."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="the seed after the last one")
    parser.add_argument("--store", choices=("memory", "sqlite", "postgres"), default="memory")
    parser.add_argument("--kills", action="store_true", help="in worker processes that are killed, on SQLite or PostgreSQL")
    parser.add_argument("--dsn", help="the place for --kills, if it is not one of its own")
    parser.add_argument("--loop", choices=("asyncio", "uvloop", "debug"), default="asyncio")
    parser.add_argument("--eager", action="store_true", help="the host's task factory starts tasks at once (3.12 and later)")
    parser.add_argument("--par", type=int, default=8, help="how many programs run side by side")
    parser.add_argument("--rounds", type=int, default=2, help="how often each program is disturbed at random places")
    parser.add_argument("--every-length", action="store_true", help="lose processes at every length of a small journal")
    parser.add_argument("--quiet", action="store_true", help="print the seeds of bad programs only")
    parser.add_argument("--only", metavar="KIND", help="programs of this construct alone")
    parser.add_argument("--most", type=int, default=20, help="stop after so many bad programs")
    args = parser.parse_args()
    if args.kills:
        return _kill(range(args.first, args.last), args.dsn, args.store)
    if args.store == "postgres":
        parser.error("--store postgres goes with --kills")
    settings = Settings(
        store=args.store,
        loop=args.loop,
        is_eager=args.eager,
        side_by_side=args.par,
        rounds=None if args.every_length else args.rounds,
        shows_failures=not args.quiet,
        stops_at=args.most,
    )
    seeds, haves = range(args.first, args.last), available(args.store)
    programs = [aimed_program(seed, args.only, haves) if args.only else random_program(seed, haves) for seed in seeds]
    report = try_programs(programs, settings)
    print(report)
    return 0 if report.is_clean else 1


def _kill(seeds: range, dsn: str | None, store: str) -> int:
    """Run the programs in worker processes that are killed."""
    with tempfile.TemporaryDirectory() as folder:
        if dsn is not None:
            pass
        elif store == "postgres":
            from tests.servers.postgres import shared_server

            dsn = shared_server().dsn
        else:
            dsn = f"sqlite:///{folder}/fuzz.db"
        report = run_killed(seeds, dsn)
    for failure in report.failures:
        print(failure)
    print(report)
    return 1 if report.failures else 0


sys.exit(main())
