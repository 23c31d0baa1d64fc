"""Whether resumes are exact: `python -m tests.exact` disturbs loops as documentation writes them, and compares."""
