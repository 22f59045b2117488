"""Tries many programs and shows which go wrong: `python -m tests.sagas.explore 0 500`. With `--seed 17` it cuts that one down."""

from __future__ import annotations

import argparse
import time
from collections import Counter

from tests.sagas.known import unknown
from tests.sagas.programs import Program, random_program
from tests.sagas.shrink import shrunk
from tests.sagas.trials import try_out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("range", type=int, nargs="*", default=[0, 300])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--kind", help="only violations of this kind")
    parser.add_argument("--as-it-is", action="store_true")
    parser.add_argument("--brief", action="store_true", help="without the log")
    args = parser.parse_args()
    if args.seed is not None:
        show(args.seed, args.kind, is_shrunk=not args.as_it_is, is_brief=args.brief)
        return
    kinds, seeds, ends = Counter[str](), dict[str, list[int]](), Counter[str]()
    began_at = time.monotonic()
    for seed in range(*args.range):
        found, trial = try_out(random_program(seed))
        ends.update(trial.ends)
        new = unknown(random_program(seed), found)
        for kind in {each.kind for each in found} | {f"NEW {each.kind}" for each in new}:
            kinds[kind] += 1
            seeds.setdefault(kind, []).append(seed)
    print(f"{time.monotonic() - began_at:.1f} s")
    print(dict(ends))
    for kind, count in kinds.most_common():
        print(f"{kind:20} {count:5} {seeds[kind][:12]}")


def show(seed: int, kind: str | None, *, is_shrunk: bool, is_brief: bool) -> None:
    program = random_program(seed)
    found, _ = try_out(program)
    wanted = kind or (found[0].kind if found else "")

    def still_fails(candidate: Program) -> bool:
        return any(each.kind == wanted for each in try_out(candidate)[0])

    if found and is_shrunk:
        program = shrunk(program, still_fails)
    found, trial = try_out(program)
    print(program)
    if not is_brief:
        print("log:", *trial.log, sep="\n  ")
    print("found:")
    for each in found:
        print("  ", each)


if __name__ == "__main__":
    main()
