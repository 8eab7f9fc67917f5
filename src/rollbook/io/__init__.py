"""Records in other formats: Arrow tables, Parquet, Hugging Face datasets, JSONL, and the files of other frameworks."""
