alter table {{relay_workers}}
	drop column seen_at,
	drop column problem,
	drop column version,
	drop column host;
