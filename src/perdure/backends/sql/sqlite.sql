-- perdure's tables, version 5, for SQLite and libSQL. A name after a dollar sign stands for a quoted identifier.
-- A statement ends with a semicolon at the end of a line, and nowhere else does a line end with one. The runs have more indexes,
-- which are in the dialect: a local file has fewer of them than a server.
-- Instants are microseconds UTC. Payloads are text or blobs, as the store writes them. Narrow columns come first, so that the
-- fence never reads a payload's overflow pages.

CREATE TABLE $meta (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE $runs (
    namespace TEXT NOT NULL,
    id TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    lease_token TEXT,
    cancel_requested INTEGER NOT NULL,
    inbox_seq INTEGER NOT NULL,
    status TEXT NOT NULL,
    held INTEGER NOT NULL,
    wake_at INTEGER,
    lease_until INTEGER,
    lease_owner TEXT,
    attempts INTEGER NOT NULL,
    problem_at INTEGER,
    problem_count INTEGER NOT NULL,
    journal_length INTEGER NOT NULL,
    workflow TEXT NOT NULL,
    version INTEGER NOT NULL,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    limit_key TEXT,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    start_at INTEGER,
    deadline INTEGER,
    parent_id TEXT,
    parent_key TEXT,
    parent_notified INTEGER NOT NULL,
    definition_hash TEXT,
    seed BLOB NOT NULL,
    input_hash BLOB NOT NULL,
    waiting_for TEXT NOT NULL,
    problem TEXT,
    metadata BLOB NOT NULL,
    running_steps BLOB,
    progress BLOB,
    outcome BLOB,
    input BLOB NOT NULL,
    PRIMARY KEY (namespace, id)
) WITHOUT ROWID;

-- What may be claimed, group by group: claim walks the distinct (workflow, version, queue, priority, whether it ever started) and
-- never a sleeping run.
CREATE INDEX $runs_wake ON $runs (namespace, workflow, version, queue, priority, (epoch > 0), wake_at, id, limit_key, held)
WHERE wake_at IS NOT NULL AND held = 0;

-- Nearly every entry closes a step, so '' stands for that phase and that kind, and takes no room. `took` is in microseconds.
CREATE TABLE $steps (
    namespace TEXT NOT NULL,
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    $key TEXT NOT NULL,
    phase TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    ok INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    took INTEGER NOT NULL,
    args_hash BLOB,
    payload BLOB NOT NULL,
    PRIMARY KEY (namespace, run_id, seq)
) WITHOUT ROWID;

-- `identity` tells a repeated signal from a new one; NULL where there is nothing to repeat.
CREATE TABLE $signals (
    namespace TEXT NOT NULL,
    run_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    dedupe TEXT,
    identity TEXT,
    consumed_by TEXT,
    payload BLOB NOT NULL,
    PRIMARY KEY (namespace, run_id, seq)
) WITHOUT ROWID;

CREATE UNIQUE INDEX $signals_identity ON $signals (namespace, run_id, identity)
WHERE identity IS NOT NULL;

CREATE INDEX $signals_waiting ON $signals (namespace, run_id, kind, name, seq)
WHERE consumed_by IS NULL;

CREATE TABLE $items (
    namespace TEXT NOT NULL,
    run_id TEXT NOT NULL,
    stream TEXT NOT NULL,
    n INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (namespace, run_id, stream, n)
) WITHOUT ROWID;

CREATE TABLE $queues (
    namespace TEXT NOT NULL,
    queue TEXT NOT NULL,
    concurrency INTEGER,
    per_key INTEGER,
    start_interval INTEGER,
    last_start_at INTEGER,
    PRIMARY KEY (namespace, queue)
) WITHOUT ROWID;

CREATE TABLE $schedules (
    namespace TEXT NOT NULL,
    id TEXT NOT NULL,
    workflow TEXT NOT NULL,
    spec TEXT NOT NULL,
    next_at INTEGER,
    metadata BLOB NOT NULL,
    input BLOB NOT NULL,
    PRIMARY KEY (namespace, id)
) WITHOUT ROWID;

CREATE TABLE $workers (
    namespace TEXT NOT NULL,
    id TEXT NOT NULL,
    seen_at INTEGER NOT NULL,
    info BLOB NOT NULL,
    PRIMARY KEY (namespace, id)
) WITHOUT ROWID;
