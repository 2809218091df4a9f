"""The run: from planned cases to a record. It knows neither suites nor stores."""
