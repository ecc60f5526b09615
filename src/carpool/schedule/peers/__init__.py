"""The batching rules of other engines, as policies over this one."""
