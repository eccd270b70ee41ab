package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// settings is a configuration file, or the part of it for a command:
//
//	database: postgres://app@db.internal/shop
//	relay:
//	  amqp-url: [amqps://a.internal, amqps://b.internal]
//	  lease: 15s
//
// A name is that of a flag, for every command that has it. A map is for one command.
type settings map[string]any

// fromFile sets each flag that neither the command line nor a variable has set. Errors show no
// values, which may be secrets.
func fromFile(cmd *cobra.Command, path string) error {
	text, err := os.ReadFile(path) //nolint:gosec // the operator names it
	if err != nil {
		return &usageError{fmt.Errorf("--config: %w", err)}
	}
	var file settings
	if err := yaml.Unmarshal(text, &file); err != nil {
		return &usageError{fmt.Errorf("--config: %s is not a YAML map of flags and commands", path)}
	}
	if unknown := file.unknown(cmd.Root(), ""); len(unknown) > 0 {
		return &usageError{fmt.Errorf("--config: %s: no flag or command is named %s", path, strings.Join(unknown, ", "))}
	}
	parts := []settings{file} // the part for the command itself last
	for _, name := range strings.Fields(cmd.CommandPath())[1:] {
		part, ok := parts[len(parts)-1][name].(settings)
		if !ok {
			break
		}
		parts = append(parts, part)
	}
	slices.Reverse(parts)
	var errs []error
	for _, part := range parts {
		errs = append(errs, part.apply(cmd.Flags()))
	}
	if err := errors.Join(errs...); err != nil {
		return &usageError{fmt.Errorf("--config: %s: %w", path, err)}
	}
	return nil
}

// unknown returns the names of s that mean nothing for a command and those below it.
func (s settings) unknown(cmd *cobra.Command, path string) (names []string) {
	for name, value := range s {
		if part, ok := value.(settings); ok {
			i := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == name })
			if i < 0 {
				names = append(names, path+name)
			} else {
				names = append(names, part.unknown(cmd.Commands()[i], path+name+".")...)
			}
		} else if name == "config" || name == "help" || name == "version" || !hasFlag(cmd, name) {
			names = append(names, path+name)
		}
	}
	slices.Sort(names)
	return names
}

// hasFlag reports whether a command, or one below it, has a flag.
func hasFlag(cmd *cobra.Command, name string) bool {
	return cmd.Flag(name) != nil || cmd.InheritedFlags().Lookup(name) != nil ||
		slices.ContainsFunc(cmd.Commands(), func(c *cobra.Command) bool { return hasFlag(c, name) })
}

func (s settings) apply(flags *pflag.FlagSet) error {
	var errs []error
	for name, value := range s {
		f := flags.Lookup(name)
		if _, isPart := value.(settings); isPart || f == nil || f.Changed {
			continue
		}
		list, ok := value.([]any)
		if !ok {
			list = []any{value}
		}
		for _, one := range list {
			if err := flags.Set(name, fmt.Sprint(one)); err != nil {
				errs = append(errs, fmt.Errorf("invalid value for %s (%s)", name, f.Value.Type()))
				break
			}
		}
	}
	return errors.Join(errs...)
}
