"""Classification of a folder or a Parquet file of documents, by Ray Data."""
