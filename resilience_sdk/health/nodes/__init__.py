"""The nodes of a job, compared and tried in pairs before its ranks start: which of them the job should leave out."""
