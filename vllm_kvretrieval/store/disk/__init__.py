"""A store on disk: its files, records, contexts and their names. Nothing here knows vLLM."""
