package recipes

import (
	"context"
	"database/sql"
	"errors"

	"github.com/ThreeDotsLabs/watermill/message"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"

	"github.com/oncemill/oncemill"
	"github.com/oncemill/oncemill/inbox"
	"github.com/oncemill/oncemill/outbox"
)

// GORM uses gorm.io/gorm.
type GORM struct {
	DB  *gorm.DB
	Box *outbox.Outbox
}

//snippet:gorm-open

// OpenGORM opens GORM on the database that oncemill takes.
func OpenGORM(db *sql.DB) (*gorm.DB, error) {
	return gorm.Open(postgres.New(postgres.Config{Conn: db}))
}

//snippet:end

//snippet:gorm-publish

// Place inserts an order and publishes it.
func (s *GORM) Place(ctx context.Context, order Order) error {
	msg, err := newMessage(order)
	if err != nil {
		return err
	}
	err = s.DB.WithContext(ctx).Transaction(func(db *gorm.DB) error {
		if err := db.Create(&order).Error; err != nil {
			return err
		}
		tx, ok := db.Statement.ConnPool.(oncemill.ExecTx)
		if !ok {
			return errors.New("GORM runs no transaction")
		}
		return s.Box.Publish(ctx, tx, "orders", msg)
	})
	if err != nil {
		return err
	}
	s.Box.Wake() // the relay of this process, if there is one; the others poll
	return nil
}

//snippet:end

//snippet:gorm-handle

// Reserve is a handler for inbox.Middleware.
func (s *GORM) Reserve(msg *message.Message) error {
	tx, ok := inbox.TxFromContext(msg.Context())
	if !ok {
		return inbox.ErrNoInbox
	}
	order, err := inbox.Decode[Order](inbox.JSON, msg)
	if err != nil {
		return err
	}
	db := s.within(msg.Context(), tx)
	if err := db.Create(&Reservation{OrderID: order.ID, Item: order.Item, Quantity: order.Quantity}).Error; err != nil {
		return err
	}
	return db.Table("stock").Where("item = ?", order.Item).Update("units", gorm.Expr("units - ?", order.Quantity)).Error
}

// within returns a session in tx. GORM's own transactions in it are savepoints.
func (s *GORM) within(ctx context.Context, tx oncemill.Tx) *gorm.DB {
	db := s.DB.Session(&gorm.Session{NewDB: true, Context: ctx})
	db.Statement.ConnPool = tx
	return db
}

//snippet:end
