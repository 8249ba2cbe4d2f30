"""The Spark data source: executors that pull straight from the brokers, and the sink."""

if __name__ != "metamq.spark_consumers":
    raise ImportError(f"import metamq.spark_consumers, not {__name__}: a bare import makes a second copy")
