"""The batching rules of other engines, as policies of this one."""
