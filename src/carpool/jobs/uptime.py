"""The uptime of a job store, stored in its database: jobs' ages are in uptime."""

from carpool.jobs.clock import StoreClock
from carpool.jobs.database import Database


def resume_time(db: Database, clock: StoreClock) -> None:
    """Continue jobs' ages from the last close of the store.

    A time in the future was written under another wall clock: it becomes now.
    """
    queries = ("SELECT seconds FROM uptime", "SELECT max(created_up_s) FROM jobs",
               "SELECT max(ended_up_s) FROM jobs")  # fmt: skip
    clock.resume(max(db.read(query)[0][0] or 0.0 for query in queries))
    query = """UPDATE jobs SET created_s = min(created_s, :now),
        started_s = min(started_s, :now), ended_s = min(ended_s, :now),
        created_up_s = coalesce(created_up_s, :up),
        ended_up_s = iif(ended_s IS NULL, NULL, coalesce(ended_up_s, :up))
        WHERE max(created_s, coalesce(started_s, 0), coalesce(ended_s, 0)) > :now
        OR created_up_s IS NULL OR (ended_s IS NOT NULL AND ended_up_s IS NULL)"""
    db.write(query, {"now": clock(), "up": clock.uptime_s()})
    note_uptime(db, clock)


def note_uptime(db: Database, clock: StoreClock) -> None:
    """Store the uptime, if there are jobs."""
    query = "UPDATE uptime SET seconds = ? WHERE EXISTS (SELECT 1 FROM jobs)"
    db.write(query, [clock.uptime_s()])
