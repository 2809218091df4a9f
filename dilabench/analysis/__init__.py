"""What suites find in their records: `analyse(record) -> Sequence[Section]`, one module per question. No torch."""
