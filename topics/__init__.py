"""The wire contract: what may be asked, what is answered, and under which names. Knows no broker and no engine."""
