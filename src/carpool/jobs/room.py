"""Room for the files of another job: which completed jobs have to go."""

from collections.abc import Iterator

from carpool.jobs.database import OPEN, Database


def too_many(db: Database, job_id: str, needed: int, most: int, most_in_all: int) -> Iterator[str]:
    """The ids of completed jobs to delete, the oldest first, until there is room.

    Each has to be deleted before the next one is asked for.

    Args:
        job_id: of the job whose files need room.
        needed: bytes of these.
        most: bytes that the files of open jobs and these may take.
        most_in_all: bytes of all files.

    Raises:
        OSError: open jobs hold too much.
    """
    query = """SELECT state, sum(bytes) AS bytes FROM jobs WHERE bytes > 0 AND id != ?
        GROUP BY state"""
    taken = {row["state"]: row["bytes"] for row in db.read(query, [job_id])}
    held = sum(taken.get(state, 0) for state in OPEN)
    if held + needed > most:
        others = f", {held} more are held by jobs that have not ended" if held else ""
        raise OSError(f"{needed} bytes{others}, the most is {most} (--max-store-bytes)")
    excess = sum(taken.values()) + needed - most_in_all
    query = """SELECT id, bytes FROM jobs WHERE bytes > 0 AND state = 'completed' AND id != ?
        ORDER BY ended_s, number LIMIT 1"""
    while excess > 0 and (oldest := db.read(query, [job_id])):
        yield oldest[0]["id"]
        excess -= oldest[0]["bytes"]
