"""What all evaluations share in their reports: tables, records, figures."""
