"""Settings of an engine and of a server: their declarations, parsers and checks.

Parsers and checks raise `SettingRejected`; its message has the value, the rule and an alternative.
"""
