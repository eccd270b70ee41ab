// Package doctor looks for what makes others lose messages silently: settings of the database and
// of its server, missing indexes, and tables that nobody purges.
//
//	d, err := doctor.New(db, doctor.Config{})
//	...
//	findings, err := d.Check(ctx)
//	...
//	for _, f := range findings {
//		log.Println(f.Severity, f.Problem, f.Remedy)
//	}
//
// It changes nothing, reads a bounded number of rows by indexes, and does not wait for long where a
// table is locked or the server is silent. It sees what its role may see: PostgreSQL shows the
// transactions of others to members of pg_monitor, and with row-level security all rows to the owner
// of a table. Package doctor/rabbitmq does the same for the broker. What goes wrong while everything
// is set right is in package status.
package doctor
