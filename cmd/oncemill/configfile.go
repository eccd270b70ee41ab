package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// settings is a configuration file, or the section of it for a command:
//
//	database: postgres://app@db.internal/shop
//	relay:
//	  amqp-url: [amqps://a.internal, amqps://b.internal]
//	  lease: 15s
//
// A name is that of a flag, for every command that has it, or that of a command, for its
// section.
type settings struct {
	flags    map[string]setting
	commands map[string]settings
}

// setting is the value of a flag, as it is written in the file: 0123 is not a number here.
type setting struct {
	values []string
	isList bool
}

// fromFile sets each flag that neither the command line nor a variable has set. Errors show no
// values, which may be secrets.
func fromFile(cmd *cobra.Command, path string) error {
	text, err := os.ReadFile(path) //nolint:gosec // the operator names it
	if err != nil {
		return &usageError{fmt.Errorf("--config: %w", err)}
	}
	root, err := document(text)
	if err != nil {
		return &usageError{fmt.Errorf("--config: %s: %w", path, err)}
	}
	section, err := readSettings(cmd.Root(), root, "")
	if err != nil {
		return &usageError{fmt.Errorf("--config: %s: %w", path, err)}
	}
	sections := []settings{section} // that of the command itself last
	for _, name := range strings.Fields(cmd.CommandPath())[1:] {
		section = section.commands[name]
		sections = append(sections, section)
	}
	slices.Reverse(sections)
	var errs []error
	for _, section := range sections {
		errs = append(errs, section.apply(cmd.Flags()))
	}
	if err := errors.Join(errs...); err != nil {
		return &usageError{fmt.Errorf("--config: %s: %w", path, err)}
	}
	return nil
}

var errNoMap = errors.New("is not a YAML map of flags and commands")

// document returns the only document of a file; an empty map if there is none.
func document(text []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var first, second yaml.Node
	switch err := decoder.Decode(&first); {
	case errors.Is(err, io.EOF):
		return &yaml.Node{Kind: yaml.MappingNode}, nil
	case err != nil:
		return nil, errNoMap // the decoder's error may show values
	}
	if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
		return nil, errors.New("has more than one YAML document; use one file for each")
	}
	return first.Content[0], nil
}

// readSettings reads the section of a command. All errors come together; path is that of the
// section.
func readSettings(cmd *cobra.Command, node *yaml.Node, path string) (settings, error) {
	s := settings{map[string]setting{}, map[string]settings{}}
	node = withoutAlias(node)
	switch {
	case isNull(node):
		return s, nil
	case node.Kind != yaml.MappingNode && path == "":
		return s, errNoMap
	case node.Kind != yaml.MappingNode:
		return s, fmt.Errorf("%s is a command; give it a map of its flags", strings.TrimSuffix(path, "."))
	}
	var values map[string]yaml.Node
	if err := node.Decode(&values); err != nil { // the error may show values
		return s, fmt.Errorf("the map in line %d has a name twice, or a name that is not a text", node.Line)
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(values)) {
		var err error
		value := values[name]
		if i := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == name }); i >= 0 {
			s.commands[name], err = readSettings(cmd.Commands()[i], &value, path+name+".")
		} else if name == "config" || name == "help" || name == "version" || !hasFlag(cmd, name) {
			err = fmt.Errorf("no flag or command is named %s", path+name)
		} else if s.flags[name], err = readSetting(&value); err != nil {
			err = fmt.Errorf("%s %w", path+name, err)
		}
		errs = append(errs, err)
	}
	return s, errors.Join(errs...)
}

func readSetting(node *yaml.Node) (setting, error) {
	node = withoutAlias(node)
	s := setting{isList: node.Kind == yaml.SequenceNode}
	items := []*yaml.Node{node}
	if s.isList {
		items = node.Content
	}
	for _, item := range items {
		item = withoutAlias(item)
		switch {
		case isNull(item):
			return s, errEmpty
		case item.Kind != yaml.ScalarNode:
			return s, errors.New("is a flag; give it a value, or a list of values")
		}
		s.values = append(s.values, item.Value)
	}
	if len(s.values) == 0 {
		return s, errEmpty
	}
	return s, nil
}

// withoutAlias returns the node that an alias stands for.
func withoutAlias(node *yaml.Node) *yaml.Node {
	if node.Kind == yaml.AliasNode {
		return node.Alias
	}
	return node
}

func isNull(node *yaml.Node) bool { return node.Kind == yaml.ScalarNode && node.ShortTag() == "!!null" }

var errEmpty = errors.New(`has no value; give it one, write "" for an empty text, or remove the line`)

// hasFlag reports whether a command, or one below it, has a flag.
func hasFlag(cmd *cobra.Command, name string) bool {
	return cmd.Flag(name) != nil || cmd.InheritedFlags().Lookup(name) != nil ||
		slices.ContainsFunc(cmd.Commands(), func(c *cobra.Command) bool { return hasFlag(c, name) })
}

func (s settings) apply(flags *pflag.FlagSet) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.flags)) {
		f := flags.Lookup(name)
		if f == nil || f.Changed {
			continue
		}
		if _, several := f.Value.(pflag.SliceValue); s.flags[name].isList && !several {
			errs = append(errs, fmt.Errorf("%s takes one value; give it no list", name))
			continue
		}
		for _, value := range s.flags[name].values {
			if err := flags.Set(name, value); err != nil {
				errs = append(errs, fmt.Errorf("invalid value for %s (%s)", name, f.Value.Type()))
				break
			}
		}
	}
	return errors.Join(errs...)
}
