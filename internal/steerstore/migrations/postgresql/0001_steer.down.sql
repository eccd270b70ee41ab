drop function {{pauses_resume}}(text, text);
drop table {{lane_commands}};
drop table {{pauses}};
