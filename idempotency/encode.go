package idempotency

import "slices"

// sealed fills in the response, and encrypts the other stored fields.
func (in *intent) sealed(c Completion, plain []byte) (_ Completion, err error) {
	of := in.claim.binding()
	c.Location = in.codec.encodeText(of, "location", c.Location)
	c.ResourceID = in.codec.encodeText(of, "resource id", c.ResourceID)
	if c.State == StateNotReplayable {
		return c, nil
	}
	c.Response, err = in.codec.encode(of, plain)
	c.Large = len(c.Response) > in.cfg.Responses.LargeAbove && c.Refuse == 0
	return c, err
}

// encoded fills in the stored form of a response.
func (in *intent) encoded(c Completion, res *response) (Completion, error) {
	c.Location = printable(res.header("Location"), mostLocation)
	kept := *res
	if in.cfg.Responses.Pointer {
		kept.body, kept.Pointer = nil, true
		kept.Header = slices.DeleteFunc(slices.Clone(res.Header), func(e headerEntry) bool { return e.Name == "Content-Type" && in.cfg.Responses.Resolve == nil })
	}
	plain, err := kept.marshal()
	if err != nil {
		return c, err
	}
	return in.sealed(c, plain)
}

const mostLocation = 2048
